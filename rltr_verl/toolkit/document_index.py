"""BM25 over documents (Robertson and Zaragoza, 2009; computed by ``bm25s``), in memory or in a folder.

A folder holds what ``bm25s`` saves, the documents as an Arrow file, and a manifest. It is opened as a memory map: the
processes of a node share scores and texts through the page cache; the vocabulary is read into each of them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pyarrow as pa

from rltr_verl.errors import DataError, DiskError
from rltr_verl.toolkit.documents import Document, read_documents

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it reports every index it builds

_LOG = logging.getLogger(__name__)
FORMAT, VERSION = "rltr-search-index", 1
_MANIFEST, _DOCUMENTS = "manifest.json", "documents.arrow"
_BATCH = 4096
_SCHEMA = pa.schema([("text", pa.string()), ("title", pa.string()), ("url", pa.string())])
_WORD = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3400-\u9fff\uf900-\ufaff]+")


def words(text: str) -> list[str]:
    """Words as BM25 counts them: NFKC, case-folded; every Chinese character stands alone."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class DocumentIndex:
    """Finds documents by BM25. Safe to share between threads."""

    def __init__(self, scores: bm25s.BM25, documents: pa.Table) -> None:
        self._scores, self._documents = scores, documents

    @classmethod
    def of(cls, documents: Iterable[Document]) -> DocumentIndex:
        """Index documents in memory. Raises :class:`DataError` if none of them holds a word."""
        tokens = _Tokens()
        batches = [_batch(chunk, tokens) for chunk in _chunks(documents)]
        return cls(tokens.score(), pa.Table.from_batches(batches, _SCHEMA))

    @classmethod
    def open(cls, folder: str | Path) -> DocumentIndex:
        """Map the index that :func:`build_index` made. Raises :class:`DataError` if it is none of this version."""
        _check_manifest(Path(folder))
        try:
            scores = bm25s.BM25.load(folder, mmap=True, show_progress=False)
            documents = pa.ipc.open_file(pa.memory_map(str(Path(folder) / _DOCUMENTS))).read_all()
        except (OSError, EOFError, ValueError, KeyError, pa.ArrowException) as error:
            raise DataError(f"the index is damaged ({error})", where=str(folder), fix=_REBUILD) from None
        return cls(scores, documents)

    def __len__(self) -> int:
        return self._documents.num_rows

    def find(self, query: str, k: int = 1) -> list[Document]:
        """The ``k`` best documents that share a word with ``query``, best first; of equal ones the earlier."""
        known = [word for word in words(query) if word in self._scores.vocab_dict]
        if not known:
            return []
        return [self._document(row) for row in _best(self._scores.get_scores(known), k)]

    def _document(self, row: int) -> Document:
        return Document(*(self._documents.column(name)[row].as_py() for name in _SCHEMA.names))


def build_index(
    source: str | Path, out: Path, *, overwrite: bool = False, on_read: Callable[[int], Any] = lambda done: None
) -> int:
    """Index the documents of a file into the folder ``out``, which appears only when it is complete.

    Args:
        source: JSONL or parquet, see :mod:`rltr_verl.toolkit.documents`.
        overwrite: replace an index that is there; processes that have it open keep the old one.
        on_read: called with the number of documents read so far.

    Returns:
        The number of documents.

    Raises:
        DataError: ``source`` cannot be read, or something else stands at ``out``.
        DiskError: ``out`` cannot be written.
    """
    try:
        return _build(source, out, overwrite, on_read)
    except OSError as error:
        fix = "choose another folder, or free the disk."
        raise DiskError(f"no index can be written ({error})", where=str(out), fix=fix) from None


def _build(source: str | Path, out: Path, overwrite: bool, on_read: Callable[[int], Any]) -> int:
    _check_place(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        made = Path(scratch) / "new"
        made.mkdir()
        count = _write(source, made, on_read)
        if out.exists():
            os.rename(out, Path(scratch) / "old")
        os.rename(made, out)
    return count


def _write(source: str | Path, folder: Path, on_read: Callable[[int], Any]) -> int:
    tokens, done, stamp = _Tokens(), 0, _stamp(source)
    with pa.OSFile(str(folder / _DOCUMENTS), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        for chunk in _chunks(read_documents(source)):
            writer.write_batch(_batch(chunk, tokens))
            done += len(chunk)
            on_read(done)
    tokens.score(str(source)).save(folder, show_progress=False)
    manifest = {"format": FORMAT, "version": VERSION, "documents": done, "source": str(source), "stamp": stamp}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return done


@dataclass
class _Tokens:
    """Documents as numbers of words: four bytes a word."""

    ids: list[array[int]] = field(default_factory=list)
    vocab: dict[str, int] = field(default_factory=dict)

    def add(self, document: Document) -> None:
        """The title counts as part of the text."""
        found = words(f"{document.title} {document.text}")
        self.ids.append(array("i", [self.vocab.setdefault(word, len(self.vocab)) for word in found]))

    def score(self, where: str = "") -> bm25s.BM25:
        if not self.vocab:
            raise DataError("no document holds a word", where=where, fix="give documents with text.")
        index = bm25s.BM25()
        index.index(self, show_progress=False)
        return index


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    left = iter(documents)
    return iter(lambda: list(islice(left, _BATCH)), [])


def _batch(documents: list[Document], tokens: _Tokens) -> pa.RecordBatch:
    for document in documents:
        tokens.add(document)
    return pa.RecordBatch.from_pylist([asdict(document) for document in documents], _SCHEMA)


def _best(scores: np.ndarray, k: int) -> list[int]:
    """Rows of the ``k`` highest positive scores, best first, equal ones in the order of the rows."""
    last = len(scores) - min(k, len(scores))
    rows = np.flatnonzero((scores >= np.partition(scores, last)[last]) & (scores > 0))
    return rows[np.argsort(-scores[rows], kind="stable")][:k].tolist()


_REBUILD = "build it anew (rltr search-index DOCUMENTS --out FOLDER --overwrite)."


def _stamp(source: str | Path) -> list[Any] | None:
    """What tells whether a file has changed: its place, size and time; None where it is not there."""
    try:
        found = Path(source).stat()
    except OSError:
        return None
    return [str(Path(source).resolve()), found.st_size, found.st_mtime_ns]


def _warn_if_older(folder: Path, stamp: Any) -> None:
    """Documents that are gone, or on another machine, say nothing."""
    if isinstance(stamp, list) and stamp and (now := _stamp(stamp[0])) is not None and now != stamp:
        _LOG.warning("%s: the documents in %s have changed since it was made. Fix: %s", folder, stamp[0], _REBUILD)


def _check_manifest(folder: Path) -> None:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"no search index is here ({_MANIFEST}: {error.strerror})"
        raise DataError(problem, where=str(folder), fix="make one: rltr search-index DOCUMENTS --out FOLDER.") from None
    except ValueError as error:
        raise DataError(f"{_MANIFEST} is not JSON ({error})", where=str(folder), fix=_REBUILD) from None
    found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else (None, None)
    if found != (FORMAT, VERSION):
        problem = f"{found[0]} version {found[1]} found, this package reads {FORMAT} version {VERSION}"
        raise DataError(problem, where=str(folder), fix=_REBUILD)
    _warn_if_older(folder, manifest.get("stamp"))


def _check_place(out: Path, overwrite: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not (out / _MANIFEST).is_file():
        raise DataError("something that is no search index is here", where=str(out), fix="choose another folder.")
    if not overwrite:
        raise DataError("an index is here", where=str(out), fix="choose another folder, or overwrite it (--overwrite).")
