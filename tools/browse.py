"""Fetch a page of the web as text.

What it does not do: run scripts, keep cookies, log in, or read PDF and images. Addresses that are not public are
refused, those that a name or a redirect leads to as well. Proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

import aiohttp
from yarl import URL

from rltr_verl import tool
from rltr_verl.errors import BadArguments, ConfigError, ToolFailed
from rltr_verl.tool_workers import THREADS, CallTimeout
from rltr_verl.toolkit.background import read_bounded
from rltr_verl.toolkit.public_net import PrivateAddress, PublicResolver, check_host, public_socket

try:
    from rltr_verl.toolkit.pages import Page, is_text, read_page
except ModuleNotFoundError as error:
    fix = "pip install 'rltr_verl[browse]'"
    raise ConfigError(f"the tool browse needs {error.name}", where="rltr.tools", fix=fix) from None

MAX_URL = 2000
_HEADER_BYTES = 1 << 16
_MOVED = (301, 302, 303, 307, 308)
_ACCEPT = {"Accept": "text/html,application/xhtml+xml,text/plain;q=0.9,*/*;q=0.5", "Accept-Encoding": "gzip, deflate"}


@dataclass(frozen=True)
class _Fetched:
    """The reply at the end of all redirects; ``body`` is cut to the bound."""

    url: str
    status: str
    content_type: str
    charset: str | None
    body: bytes


@tool
async def browse(
    url: str,
    page: int = 1,
    *,
    timeout_s: float = 20.0,
    max_bytes: int = 1 << 20,
    max_redirects: int = 5,
    page_chars: int = 1500,
    allow_private: bool = False,
    user_agent: str = "rltr-browse/1.0",
) -> str:
    """Fetch a web page and return its main text.

    Args:
        url: address of the page, starting with http:// or https://
        page: which part of a long text to return, counted from 1.
    """
    if page < 1:
        raise BadArguments("page is counted from 1")
    try:
        reading = _read(url, user_agent, max_redirects, max_bytes, allow_private, timeout_s)
        found, read = await asyncio.wait_for(reading, timeout_s)
    except (asyncio.TimeoutError, CallTimeout):
        raise ToolFailed(f"{url} did not answer within {timeout_s:g} s") from None
    return _shown(found, read.title, read.text, page, page_chars)


async def _read(
    url: str, user_agent: str, hops: int, max_bytes: int, allow_private: bool, timeout_s: float
) -> tuple[_Fetched, Page]:
    async with _session(allow_private, user_agent) as session:
        found = await _follow(session, url, hops, max_bytes, allow_private)
    if not is_text(found.content_type):
        raise ToolFailed(f"{found.url} is {found.content_type}, not text")
    # not in the event loop's executor, which resolves names: a page that takes too long is left to its thread
    reading = THREADS.submit(functools.partial(read_page, found.body, found.content_type, found.charset))
    return found, await reading.result(timeout_s)


def _session(allow_private: bool, user_agent: str) -> aiohttp.ClientSession:
    """Connections of one call: no cookies, and public addresses only unless ``allow_private``."""
    guards: dict[str, Any] = {} if allow_private else {"resolver": PublicResolver(), "socket_factory": public_socket}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(use_dns_cache=False, **guards),
        headers={**_ACCEPT, "User-Agent": user_agent},
        cookie_jar=aiohttp.DummyCookieJar(),
        max_line_size=_HEADER_BYTES,
        max_field_size=_HEADER_BYTES,
    )


async def _follow(session: aiohttp.ClientSession, url: str, hops: int, max_bytes: int, allow_private: bool) -> _Fetched:
    """Fetch ``url``, going after at most ``hops`` redirects; each address is checked anew."""
    first, target, goal = True, "", url
    for _ in range(hops + 1):
        try:
            target = urljoin(target, goal)
            _check(target, allow_private)
            found = await _get(session, target, max_bytes)
        except PrivateAddress:
            raise _refused(first, f"{target} is not a public address") from None
        except ValueError as error:
            raise _refused(first, f"{goal!r} cannot be fetched: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ToolFailed(f"{target} cannot be reached ({error or type(error).__name__})") from None
        if isinstance(found, _Fetched):
            return found
        first, goal = False, found
    raise ToolFailed(f"{url} redirects more than {hops} times")


def _check(url: str, allow_private: bool) -> None:
    """Raise ``ValueError`` or :class:`PrivateAddress` for what must not be fetched, as far as the URL alone tells."""
    if len(url) > MAX_URL:
        raise ValueError(f"it is longer than {MAX_URL} characters")
    parts = URL(url)
    if parts.scheme not in ("http", "https") or not parts.raw_host:
        raise ValueError("only http:// and https:// addresses can be")
    if parts.user is not None or len(parts.raw_host.split()) > 1:
        raise ValueError("it holds a user name or a blank before the path")
    if not allow_private:
        check_host(parts.raw_host)


async def _get(session: aiohttp.ClientSession, url: str, max_bytes: int) -> _Fetched | str:
    """The reply to one request, or where it redirects to. Raises :class:`ToolFailed` for HTTP 4xx and 5xx."""
    async with session.get(url, allow_redirects=False) as reply:
        location = reply.headers.get("Location")
        if reply.status in _MOVED and location:
            return location
        status = f"HTTP {reply.status} {reply.reason or ''}".rstrip()
        if reply.status >= 400:
            raise ToolFailed(f"{status} from {reply.url}")
        body = await read_bounded(reply, max_bytes) if is_text(reply.content_type) else b""
        return _Fetched(str(reply.url), status, reply.content_type, reply.charset, body)


def _refused(first: bool, problem: str) -> BadArguments | ToolFailed:
    """The caller's mistake where the address is the one it gave, the page's where a redirect led there."""
    return BadArguments(problem) if first else ToolFailed(problem)


def _shown(found: _Fetched, title: str, text: str, page: int, page_chars: int) -> str:
    pages = max(1, -(-len(text) // page_chars))
    if page > pages:
        raise BadArguments(f"there are {pages} pages of {found.url}")
    head = [f"{found.status}: {found.url}", f"Title: {title}" if title else "", f"Page {page} of {pages}"]
    part = text[(page - 1) * page_chars : page * page_chars].strip() or "There is no text on this page."
    return "\n".join([*(line for line in head if line), "", part])
