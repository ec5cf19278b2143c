"""An event loop in a thread of its own, one per process, for connections that outlive a caller's loop."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")
_CLOSING_S = 10.0


class BackgroundLoop:
    """Runs coroutines of any thread in one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._closers: list[Callable[[], Awaitable[Any]]] = []
        self._http: aiohttp.ClientSession | None = None
        threading.Thread(target=self._loop.run_forever, name="rltr-background", daemon=True).start()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start ``work``; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work`` for a caller without a loop; blocks its thread."""
        return self.start(work).result()

    async def until(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work`` for a caller in another loop; a cancelled caller cancels it."""
        return await asyncio.wrap_future(self.start(work))

    async def http(self) -> aiohttp.ClientSession:
        """One HTTP session, without cookies, for what runs in this loop."""
        if self._http is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._http = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
            self.at_close(self._http.close)
        return self._http

    def at_close(self, close: Callable[[], Awaitable[Any]]) -> None:
        """Await ``close()`` when the process ends."""
        self._closers.append(close)

    def close(self) -> None:
        """Run what :meth:`at_close` was given, at most ten seconds."""
        closers, self._closers = self._closers, []
        if not closers:
            return
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self.start(_all(closers)).result(_CLOSING_S)


async def _all(closers: list[Callable[[], Awaitable[Any]]]) -> None:
    await asyncio.gather(*(close() for close in closers), return_exceptions=True)


_LOCK = threading.Lock()
_LOOPS: dict[int, BackgroundLoop] = {}


def background() -> BackgroundLoop:
    """The loop of this process; a forked one gets its own, since threads do not survive a fork."""
    with _LOCK:
        loop = _LOOPS.get(os.getpid())
        if loop is None:
            loop = _LOOPS[os.getpid()] = BackgroundLoop()
            atexit.register(loop.close)
        return loop


async def read_bounded(reply: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body, or its first ``limit`` bytes."""
    body = bytearray()
    async for block in reply.content.iter_any():
        body += block
        if len(body) >= limit:
            break
    return bytes(body[:limit])
