"""Search through a server: SearXNG, a Serper-style service, or a JSON endpoint as retrieval servers for agents take.

A request that the server refuses ends in :class:`ToolFailed`. One that it could not answer (no connection, no reply in
time, HTTP 5xx, or 429 twice) ends in ``ConnectionError``, a fault of the surroundings.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, Literal

import aiohttp

from rltr_verl.errors import ToolFailed
from rltr_verl.toolkit.background import background, read_bounded
from rltr_verl.toolkit.documents import Document

Kind = Literal["searxng", "serper", "json"]

SERPER_URL = "https://google.serper.dev/search"
_BODY_BYTES = 1 << 22
_PASSING = (408, 425, 429)
_NO_JSON = ": its settings.yml must list json under search.formats"
_LISTS = ("result", "results", "documents", "data")
_TEXT = ("text", "contents", "content", "snippet", "answer", "description", "passage", "body")
_TITLE = ("title", "key", "name")
_URL = ("url", "link")


@dataclass(frozen=True)
class SearchServer:
    """A server and how it is asked.

    Args:
        url: address; of SearXNG with or without ``/search``.
        key: sent as ``X-API-KEY``.
        timeout_s: wall seconds of a query, waiting after a 429 included.
        scores: json: what ``return_scores`` asks for; replies are read with and without them.
        fields: further fields of every request, for example ``{"language": "de"}``.
    """

    kind: Kind
    url: str
    key: str | None = None
    timeout_s: float = 10.0
    scores: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)

    def find(self, query: str, k: int) -> list[Document]:
        """At most ``k`` results for ``query``, best first. Blocks; connections are kept for the next call."""
        try:
            reply = background().wait(asyncio.wait_for(self._ask(query, k), self.timeout_s))
        except (asyncio.TimeoutError, concurrent.futures.TimeoutError):
            raise ConnectionError(f"no reply from {self.url} within {self.timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{self.url}: {error or type(error).__name__}") from None
        return _found(reply, self.kind)[:k]

    async def _ask(self, query: str, k: int, again: bool = True) -> Any:
        session = await background().http()
        async with session.request(**self._request(query, k), allow_redirects=False) as reply:
            if not (again and reply.status == 429):
                return await self._body(reply)
            pause = _retry_after(reply.headers.get("Retry-After"))
        await asyncio.sleep(pause)
        return await self._ask(query, k, again=False)

    def _request(self, query: str, k: int) -> dict[str, Any]:
        """The request as aiohttp takes it."""
        headers = {"X-API-KEY": self.key} if self.key else {}
        if self.kind == "searxng":
            url = self.url.rstrip("/").removesuffix("/search") + "/search"
            return {
                "method": "GET",
                "url": url,
                "params": {**self.fields, "q": query, "format": "json"},
                "headers": headers,
            }
        body: dict[str, Any] = {"q": query, "num": k}
        if self.kind == "json":
            body = {"queries": [query], "topk": k, "return_scores": self.scores}
        return {"method": "POST", "url": self.url, "json": {**self.fields, **body}, "headers": headers}

    async def _body(self, reply: aiohttp.ClientResponse) -> Any:
        if reply.status >= 500 or reply.status in _PASSING:
            raise ConnectionError(f"{self.url} answered HTTP {reply.status}")
        if reply.status >= 300:  # a redirect is not followed: it would carry the key along
            hint = _NO_JSON if self.kind == "searxng" and reply.status == 403 else ""
            raise ToolFailed(f"the search server refused the request (HTTP {reply.status}){hint}")
        try:
            return json.loads(await read_bounded(reply, _BODY_BYTES))
        except (ValueError, RecursionError):
            raise ToolFailed("the search server's reply is not JSON") from None


def _retry_after(value: str | None) -> float:
    """Seconds to wait; the header holds seconds or a date. One second if it is absent or unreadable."""
    try:
        return max(0.0, float(value or 1))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value or "").timestamp() - time())
    except ValueError:
        return 1.0


def _found(reply: Any, kind: Kind) -> list[Document]:
    """The results of a reply; :class:`ToolFailed` if it holds no list of them."""
    found = _rows(reply, kind)
    if not isinstance(found, list):
        raise ToolFailed("the search server's reply holds no list of results")
    documents = [document for entry in found if (document := _document(entry)) is not None]
    if found and not documents:
        raise ToolFailed("no result of the search server holds a text")
    return documents


def _rows(reply: Any, kind: Kind) -> Any:
    if kind == "json":
        found = next((reply[name] for name in _LISTS if name in reply), None) if isinstance(reply, dict) else reply
        return found[0] if isinstance(found, list) and found and isinstance(found[0], list) else found
    if not isinstance(reply, dict):
        return None
    if kind == "searxng":
        return reply.get("results")
    return [reply[name] for name in ("answerBox", "knowledgeGraph") if name in reply] + list(reply.get("organic") or ())


def _document(entry: Any) -> Document | None:
    """One result: a text, an object, or an object under ``document`` beside its score."""
    if isinstance(entry, dict) and "document" in entry:
        entry = entry["document"]
    if isinstance(entry, str):
        return Document(entry)
    if not isinstance(entry, dict):
        return None
    text, title = _first(entry, _TEXT), _first(entry, _TITLE)
    return Document(text, title, _first(entry, _URL)) if text or title else None


def _first(entry: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((str(entry[name]) for name in names if entry.get(name)), "")
