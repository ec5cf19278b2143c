"""Documents to search in, read from a JSONL or parquet file one at a time.

A document has a text (``text`` or ``contents``) and may have a title (``key`` or ``title``) and an address (``url``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rltr_verl.errors import DataError

_TEXT, _TITLE, _URL = ("text", "contents"), ("key", "title"), ("url",)
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """What a search finds: its text, and title and address where they are known."""

    text: str
    title: str = ""
    url: str = ""


def read_documents(path: str | Path) -> Iterator[Document]:
    """The documents of a ``.parquet`` file or of JSON lines, in order; blank lines are passed over.

    Raises :class:`DataError` naming file and line for what is no document, or if there is none.
    """
    empty = True
    for number, entry in _entries(Path(path)):
        yield _document(entry, f"{path}, {number}")
        empty = False
    if empty:
        raise DataError("there is no document", where=str(path), fix='write lines like {"title": ..., "text": ...}.')


def count_rows(path: str | Path) -> int:
    """Rows of a parquet file, or lines of a text file, blank ones included."""
    try:
        if _is_parquet(Path(path)):
            return pq.ParquetFile(path).metadata.num_rows
        with open(path, "rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        yield from _parquet(path) if _is_parquet(path) else _lines(path)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def _is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    file = pq.ParquetFile(path)
    wanted = [name for name in file.schema_arrow.names if name in (*_TEXT, *_TITLE, *_URL)]
    number = 0
    for batch in file.iter_batches(columns=wanted, batch_size=4096):
        for entry in batch.to_pylist():
            number += 1
            yield f"row {number}", entry


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", _decoded(line)


def _decoded(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _document(entry: Any, where: str) -> Document:
    try:
        text, title, url = [_first(entry, names) for names in (_TEXT, _TITLE, _URL)]
    except UnicodeDecodeError:
        fix = "make the column a string column."
        raise DataError("bytes that are not UTF-8 text", where=where, fix=fix) from None
    if text is None:
        raise DataError('not a document with "text"', where=where, fix='write {"title": ..., "text": ...}.')
    return Document(text, title or "", url or "")


def _first(entry: Any, names: tuple[str, ...]) -> str | None:
    if not isinstance(entry, Mapping):
        return None
    return next((_text(entry[name]) for name in names if entry.get(name) is not None), None)


def _text(value: Any) -> str:
    """``value`` as text: bytes decoded, lone surrogates, which JSON may hold and UTF-8 may not, replaced."""
    text = value.decode("utf-8") if isinstance(value, bytes) else str(value)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _unreadable(path: str | Path, error: Exception) -> DataError:
    reason = error.strerror if isinstance(error, OSError) else None
    if isinstance(error, UnicodeDecodeError):
        reason = "it is not UTF-8 text"
    fix = "give a JSONL or .parquet file of documents."
    return DataError(f"cannot read the search corpus: {reason or error}", where=str(path), fix=fix)
