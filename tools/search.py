"""Search: BM25 over documents of your own, in memory or from an index on disk, or a search server."""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from typing import Any, Literal

from rltr_verl import tool
from rltr_verl.errors import BadArguments, ConfigError, DataError, ToolFailed
from rltr_verl.toolkit.document_index import DocumentIndex, words
from rltr_verl.toolkit.documents import Document, read_documents
from rltr_verl.toolkit.search_servers import SERPER_URL, SearchServer

Backend = Literal["corpus", "index", "searxng", "serper", "json"]

NOTHING_FOUND = "No document found."
SERVER_RESULTS = 5
"""Results of a server where ``k`` is not set (ours); of documents of one's own it is 1."""

_WHERE = "rltr.tool_settings.search"
_OPENING = threading.Lock()  # calls run in threads; without it each of the first ones would build the index


def usable(
    backend: Backend | None,
    corpus: str | None,
    index: str | None,
    url: str | None,
    key_env: str | None,
    timeout_s: float,
    scores: bool,
    fields: dict[str, Any] | None,
    k: int | None,
    max_chars: int,
) -> None:
    """Read the documents or the index, or ask the server once; raise where that does not work."""
    for name, value in (("k", k), ("max_chars", max_chars), ("timeout_s", timeout_s)):
        if value is not None and value <= 0:
            raise ConfigError(f"{value:g} is no limit", where=name, fix="give a number above 0.")
    source = _source(backend, corpus, index)
    if source is not None:
        _opened(*source)
        return
    server = _server(backend, url, key_env, timeout_s, scores, fields)
    try:
        server.find("test", 1)
    except (ToolFailed, ConnectionError) as error:
        raise ConfigError(f"the search server does not work ({error})", fix="check backend, url and key_env.") from None


@tool(check=usable)
def search(
    query: str,
    *,
    backend: Backend | None = None,
    corpus: str | None = None,
    index: str | None = None,
    url: str | None = None,
    key_env: str | None = None,
    k: int | None = None,
    max_chars: int = 4000,
    timeout_s: float = 10.0,
    scores: bool = True,
    fields: dict[str, Any] | None = None,
) -> str:
    """Find the document that matches the query best and return its text.

    Args:
        query: the words to look for.
        backend: setting; where to search. Left out, it is corpus or index, whichever is given.
        corpus: setting; JSONL or parquet file of documents, indexed in memory.
        index: setting; folder made by `rltr search-index`.
        url: setting; address of the server.
        key_env: setting; environment variable with the server's key (serper: SERPER_API_KEY).
        k: setting; number of results; left out, 1 of documents of one's own and 5 of a server.
        max_chars: setting; longest text of one result.
        timeout_s: setting; wall seconds of a query to a server.
        scores: setting; json: whether the server is asked for scores.
        fields: setting; further fields of a request to a server.
    """
    if not words(query):
        raise BadArguments("the query holds no word")
    source = _source(backend, corpus, index)
    if source is not None:
        found = _opened(*source).find(query, k or 1)
    else:
        found = _server(backend, url, key_env, timeout_s, scores, fields).find(query, k or SERVER_RESULTS)
    if not found:
        return NOTHING_FOUND
    if source is not None and (k or 1) == 1:
        return _clipped(found[0].text, max_chars)
    return "\n\n".join(_entry(number, document, max_chars) for number, document in enumerate(found, 1))


def _source(backend: Backend | None, corpus: str | None, index: str | None) -> tuple[str, str] | None:
    """Which documents of one's own to search, or None for a server."""
    given: dict[Any, str | None] = {"corpus": corpus, "index": index}
    if backend is None:
        named = [(name, path) for name, path in given.items() if path is not None]
        if len(named) != 1:
            problem = "set either corpus or index" if named else "it is not set where to search"
            fix = "set corpus to a JSONL file, index to a folder of `rltr search-index`, or backend to a server."
            raise ConfigError(problem, fix=fix)
        return named[0]
    if backend not in given:
        return None
    path = given[backend]
    if path is None:
        raise ConfigError(f"backend={backend} needs '{backend}'", fix=f"add {_WHERE}.{backend}=PATH.")
    return backend, path


def _opened(backend: str, path: str) -> DocumentIndex:
    with _OPENING:
        return _open(backend, path)


@lru_cache(maxsize=8)
def _open(backend: str, path: str) -> DocumentIndex:
    """Once per process; a changed file is seen by the next process."""
    if backend == "index":
        return DocumentIndex.open(path)
    try:
        return DocumentIndex.of(read_documents(path))
    except DataError as error:
        fix = f"set {_WHERE}.corpus to a file of documents."
        raise DataError(error.problem, where=error.where or path, fix=fix) from None


def _server(
    backend: Any,
    url: str | None,
    key_env: str | None,
    timeout_s: float,
    scores: bool,
    fields: dict[str, Any] | None,
) -> SearchServer:
    if backend == "serper":
        url, key_env = url or SERPER_URL, key_env or "SERPER_API_KEY"
    if not url:
        raise ConfigError(f"backend={backend} needs 'url'", fix=f"add {_WHERE}.url=http://...")
    key = os.environ.get(key_env) if key_env else None
    if key_env and not key:
        raise ConfigError(f"the variable {key_env} is not set", fix=f"export {key_env}=...")
    return SearchServer(backend, url, key, timeout_s, scores, fields or {})


def _entry(number: int, document: Document, max_chars: int) -> str:
    head = f"[{number}] {document.title}".rstrip() + (f" ({document.url})" if document.url else "")
    return f"{head}\n{_clipped(document.text, max_chars)}".rstrip()


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length].rstrip() + " ..."
