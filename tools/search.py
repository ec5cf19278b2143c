"""Offline search over a file of documents, ranked by BM25 (Robertson and Zaragoza, 2009; computed by ``bm25s``)."""

from __future__ import annotations

import json
import logging
import re
import threading
import unicodedata
from functools import lru_cache
from pathlib import Path

import bm25s
import numpy as np

from rltr_verl import tool
from rltr_verl.errors import BadArguments, DataError

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it reports every index it builds

NOTHING_FOUND = "No document found."

_BUILDING = threading.Lock()  # calls run in threads; without it each of the first ones would build the index
_WORD = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]|[^\W_\u3400-\u9fff\uf900-\ufaff]+")


def readable(corpus: str) -> None:
    """Raise :class:`DataError` unless ``corpus`` is a file of documents."""
    _documents(corpus)


@tool(check=readable)
def search(query: str, *, corpus: str) -> str:
    """Find the document that matches the query best and return its text.

    Args:
        query: the words to look for.
        corpus: setting; path of a JSONL file whose lines hold "text" and optionally "key" or "title".
    """
    with _BUILDING:
        index, vocabulary, texts = _index(corpus)
    words = _words(query)
    if not words:
        raise BadArguments("the query holds no word")
    known = [word for word in words if word in vocabulary]
    if not known:
        return NOTHING_FOUND
    return texts[int(np.argmax(index.get_scores(known)))]


def _words(text: str) -> list[str]:
    """Words as BM25 counts them: NFKC, case-folded; every Chinese character stands alone."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


@lru_cache(maxsize=8)
def _index(corpus: str) -> tuple[bm25s.BM25, frozenset[str], tuple[str, ...]]:
    """Read and index a corpus once per process; a changed file is seen by the next process."""
    documents = _documents(corpus)
    words = [_words(f"{key} {text}") for key, text in documents]
    index = bm25s.BM25()
    index.index(words, show_progress=False)
    return index, frozenset(word for document in words for word in document), tuple(text for _, text in documents)


def _documents(corpus: str) -> list[tuple[str, str]]:
    """Key and text of every document."""
    documents = [_document(line, corpus, number) for number, line in enumerate(_lines(corpus), 1) if line.strip()]
    if not documents:
        raise DataError("the corpus holds no document", where=corpus, fix='write lines like {"key": ..., "text": ...}.')
    return documents


def _lines(corpus: str) -> list[str]:
    try:
        return Path(corpus).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fix = "set rltr.tool_settings.search.corpus to a JSONL file (`rltr world build` writes facts.jsonl)."
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"cannot read the search corpus: {reason}", where=corpus, fix=fix) from None


def _document(line: str, corpus: str, number: int) -> tuple[str, str]:
    try:
        entry = json.loads(line)
        return str(entry.get("key", entry.get("title", ""))), str(entry["text"])
    except (ValueError, KeyError, AttributeError):
        where = f"{corpus}, line {number}"
        raise DataError('not a document with "text"', where=where, fix='write {"key": ..., "text": ...}.') from None
