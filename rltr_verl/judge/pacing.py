"""Short pieces of work on the event loop, in order, and never many of them at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Generic, TypeVar

from rltr_verl.errors import RltrError

_SLICE_S = 0.005

T = TypeVar("T")


class Paced(Generic[T]):
    """Runs what it is given for about 5 ms per turn of the event loop: a thousand prompts that are to be rendered at
    the same moment do not hold up the replies that come in meanwhile."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[], T], asyncio.Future[T]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises (an :class:`RltrError`)."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # an earlier one may have ended with work left
            self._queue.clear()
            self._loop = loop
        future: asyncio.Future[T] = loop.create_future()
        self._queue.append((work, future))
        if len(self._queue) == 1:
            loop.call_soon(self._turn)
        return await future

    def _turn(self) -> None:
        end = perf_counter() + _SLICE_S
        while self._queue and perf_counter() < end:
            _finish(*self._queue[0])
            self._queue.popleft()
        if self._queue:
            asyncio.get_running_loop().call_soon(self._turn)


def _finish(work: Callable[[], T], future: asyncio.Future[T]) -> None:
    if future.done():  # cancelled meanwhile
        return
    try:
        future.set_result(work())
    except RltrError as error:
        future.set_exception(error)
