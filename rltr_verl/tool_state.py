"""The objects of tools with state, one a trajectory: opened at their first call, closed when the trajectory ends."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rltr_verl.errors import ToolError
from rltr_verl.tool_workers import LOOP, THREADS, Job
from rltr_verl.tooling import State

logger = logging.getLogger(__name__)


_CANCEL_S, _STEPS = 1.0, 50
"""How long a cancelled coroutine may take to end before the object is held for lost (as `rltr test-tool` asks)."""


class StateLost(ToolError):
    """The object cannot be used any more: a call that timed out is still at work in it."""


class OpenObject:
    """An object of a trajectory. Calls in it run one after the other, in the order of the turn.

    ``last`` is its last call as a coroutine, which may go on for a while after it was cancelled.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.value: Any = None
        self.is_open = False
        self.lost = False
        self.last: Job | None = None
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def use(self, row: Mapping[str, Any], timeout_s: float) -> AsyncIterator[Any]:
        """The object, opened if need be and held for one call.

        Raises what opening raises, CallTimeout when that does not end, :class:`StateLost` after a call in a thread
        has not ended.
        """
        async with self._turn:
            if self.lost or not await self._settled():
                raise StateLost(f"'{self.state.name}' is still busy with an earlier call")
            if not self.is_open:
                await self._open(row, timeout_s)
            yield self.value

    async def close(self, timeout_s: float) -> None:
        """Close the object if it was made. A failure is logged; nobody could act on it."""
        try:
            await self.close_or_raise(timeout_s)
        except Exception as error:  # a user's close may raise anything
            logger.warning("closing '%s' failed (%s: %s)", self.state.name, type(error).__name__, error)

    async def close_or_raise(self, timeout_s: float) -> None:
        """Close the object if it was made. Raises what its ``close`` raises, CallTimeout if it does not end."""
        value, self.value, self.is_open = self.value, None, False
        if value is None:
            return
        await self._settled()
        try:
            if self.state.close is not None:
                await invoke(self.state.close, value, timeout_s=timeout_s)
        finally:
            last = [value]
            del value
            THREADS.submit(last.clear)  # a __del__ that takes its time takes a thread's

    async def _settled(self) -> bool:
        """Whether the last coroutine has ended; a cancelled one is given a while to."""
        for _ in range(_STEPS):
            if self.last is None or self.last.ended:
                return True
            await asyncio.sleep(_CANCEL_S / _STEPS)
        return False

    async def _open(self, row: Mapping[str, Any], timeout_s: float) -> None:
        try:
            self.value = await invoke(self.state.make, timeout_s=timeout_s, late=self._close_late)
            if self.state.open is not None:
                await invoke(self.state.open, self.value, row, timeout_s=timeout_s)
            self.is_open = True
        finally:
            if not self.is_open:
                await self.close(timeout_s)

    def _close_late(self, value: Any) -> None:
        """Close an object whose making was given up; runs in the thread that made it."""
        close = self.state.close
        if close is not None:
            asyncio.run(close(value)) if inspect.iscoroutinefunction(close) else close(value)


class Trajectory:
    """The objects of one trajectory.

    Args:
        row: ``extra_info`` of the trajectory's row, for ``open``.
        timeout_s: wall time that opening or closing an object may take.
    """

    def __init__(self, row: Mapping[str, Any] | None = None, timeout_s: float = 30.0) -> None:
        self.row: Mapping[str, Any] = row if isinstance(row, Mapping) else {}
        self._timeout_s = timeout_s
        self._objects: dict[State, OpenObject] = {}

    def object_of(self, state: State) -> OpenObject:
        """This trajectory's object of ``state``."""
        return self._objects.setdefault(state, OpenObject(state))

    async def __aenter__(self) -> Trajectory:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._objects:
            await asyncio.shield(self._close())  # also where the trajectory is cancelled once more meanwhile

    async def _close(self) -> None:
        opened, self._objects = list(self._objects.values()), {}
        await asyncio.gather(*(item.close(self._timeout_s) for item in opened))


async def invoke(
    function: Callable[..., Any], *args: Any, timeout_s: float, late: Callable[[Any], None] | None = None
) -> Any:
    """Call a function of the user where it belongs: a coroutine function in the tools' loop, another in a thread."""
    call = functools.partial(function, *args)
    job = LOOP.submit(call) if inspect.iscoroutinefunction(function) else THREADS.submit(call, late)
    return await job.result(timeout_s)
