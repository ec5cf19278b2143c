"""Runs the calls of a turn: check, time out, never raise; one typed observation per call.

Only faults that are the policy's own end in a status it is charged for; whatever happens inside a tool does not reach
the rollout as an exception. What cannot be survived stands in :mod:`rltr_verl.tool_workers`.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import logging
import random
import time
import traceback
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from rltr_verl.config import RolloutSettings, ToolLimits
from rltr_verl.errors import BadArguments, ConfigError, ToolFailed
from rltr_verl.schemas import argument_problem
from rltr_verl.tool_arguments import coerced
from rltr_verl.tool_guard import HUNG_LIMIT, Breaker, CallLimits, Gate, ResultCache, ToolStats
from rltr_verl.tool_state import OpenObject, StateLost
from rltr_verl.tool_state import Trajectory as ToolTrajectory
from rltr_verl.tool_workers import LOOP, THREADS, CallTimeout, Job
from rltr_verl.tooling import Tool
from rltr_verl.trajectory import Observation, Status, ToolCall

logger = logging.getLogger(__name__)

_PAUSE_S = 0.1
_CUT = " ...[cut]... "
Outcome = tuple[Status, str]


class ToolRunner:
    """Executes tool calls concurrently, each within its tool's limits.

    Args:
        tools: ``{name: Tool}`` as :func:`rltr_verl.tooling.load_tools` gives them.
        timeout_s: wall seconds of one call once it has a free slot; a synchronous tool that hangs keeps its thread.
        max_parallel_calls: calls of one turn that run; the others get an observation that says so.
        limits: per tool, where they differ from ``timeout_s`` and the defaults of :class:`CallLimits`.
        max_output_chars: longer results are cut in the middle before anything else is done with them.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        timeout_s: float = 30.0,
        max_parallel_calls: int = 4,
        limits: Mapping[str, CallLimits] | None = None,
        max_output_chars: int = 65_536,
    ) -> None:
        self._timeout_s = timeout_s
        self._limit, self._max_chars = max_parallel_calls, max_output_chars
        own = limits or {}
        self._lanes = {
            name: Lane(item, own.get(name) or _default_limits(item, timeout_s), max_output_chars)
            for name, item in tools.items()
        }

    @classmethod
    def from_settings(cls, tools: Mapping[str, Tool], settings: RolloutSettings) -> ToolRunner:
        """The runner that ``rltr.rollout`` describes.

        Raises ConfigError for limits of a tool that is not there, a cache for one that is not pure, and a tool whose
        own limit of time lies at or above the runner's: the call would always end before the tool says how far it is.
        """
        unknown = sorted(set(settings.tool_limits) - set(tools))
        if unknown:
            where, fix = "rltr.rollout.tool_limits", f"name tools out of {', '.join(tools) or 'none'}."
            raise ConfigError(f"limits for '{unknown[0]}', which is no tool of this recipe", where=where, fix=fix)
        return cls(
            tools,
            timeout_s=settings.tool_timeout_s,
            max_parallel_calls=settings.max_parallel_calls,
            limits={name: call_limits(item, settings) for name, item in tools.items()},
            max_output_chars=32 * settings.max_observation_tokens,
        )

    @asynccontextmanager
    async def trajectory(self, row: Mapping[str, Any] | None = None) -> AsyncIterator[ToolTrajectory]:
        """Where a trajectory's objects live; all are closed at the end, whatever ends it."""
        async with ToolTrajectory(row, self._timeout_s) as opened:
            yield opened

    async def run(
        self,
        calls: Sequence[ToolCall],
        allowed: Iterable[str] | None = None,
        trajectory: ToolTrajectory | None = None,
    ) -> tuple[Observation, ...]:
        """Observations in the order of ``calls``.

        Args:
            calls: of one turn; they run at the same time.
            allowed: restricts the tools of this trajectory.
            trajectory: see :meth:`trajectory`; without one, tools with state live for these calls only.
        """
        if trajectory is None:
            async with self.trajectory() as opened:
                return await self.run(calls, allowed, opened)
        names = set(self._lanes) if allowed is None else set(allowed) & set(self._lanes)
        running = [self._one(call, names, trajectory) for call in calls[: self._limit]]
        done = [await running[0]] if len(running) == 1 else list(await asyncio.gather(*running))
        refused = f"Not executed: at most {self._limit} calls a turn are run. Call again in your next turn."
        done += [Observation(refused, Status.NOT_EXECUTED, call.name) for call in calls[self._limit :]]
        return tuple(done)

    def stats(self) -> dict[str, dict[str, float]]:
        """``{tool: figures}`` since the process started; see :class:`ToolStats`."""
        return {name: lane.stats.as_dict() for name, lane in self._lanes.items()}

    async def _one(self, call: ToolCall, names: set[str], trajectory: ToolTrajectory) -> Observation:
        if call.arguments is None:
            text = as_text(f"Error: the call could not be read ({call.error}).", self._max_chars)
            return Observation(text, Status.UNREADABLE, call.name)
        if call.name not in names:
            text = f"Error: unknown tool '{call.name:.100}'. Tools: {', '.join(sorted(names)) or 'none'}."
            return Observation(as_text(text), Status.UNKNOWN_TOOL, call.name)
        lane, start = self._lanes[call.name], time.perf_counter()
        status, text = await lane.run(call.arguments, trajectory)
        seconds = time.perf_counter() - start
        lane.stats.add(status, seconds)
        return Observation(text, status, call.name, seconds)


class Lane:
    """All calls of one tool in this process."""

    def __init__(self, tool: Tool, limits: CallLimits, max_output_chars: int = 65_536) -> None:
        self.tool, self.limits, self.stats = tool, limits, ToolStats()
        self._max_chars = max_output_chars
        self._gate = Gate(limits.concurrency)
        self._breaker = Breaker(tool.name, limits.rest_after, limits.rest_s)
        self._cache = ResultCache() if limits.cache else None
        self._hung: list[Job] = []
        self._seen: set[type[Exception]] = set()

    async def run(self, given: Mapping[str, Any], trajectory: ToolTrajectory) -> Outcome:
        """Status and text of one call; never raises for anything that the policy or the tool does."""
        arguments, problem = self._checked(given)
        if problem:
            return Status.BAD_ARGUMENTS, f"Error: bad arguments for '{self.tool.name}': {problem}."
        kept = self._cache.get(arguments) if self._cache else None
        if kept is not None:
            self.stats.cached += 1
            return Status.OK, kept
        async with self._gate:
            status, text = await self._attempts(arguments, trajectory)
        if self._cache and status is Status.OK:
            self._cache.put(arguments, text)
        return status, text

    def _checked(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
        """The arguments as the tool takes them, and what is wrong with them."""
        try:
            arguments = coerced(self.tool.parameters, given)
            problem = argument_problem(self.tool.parameters, arguments)
            json.dumps(arguments)  # what cannot be written cannot be kept, dumped or compared either
            return arguments, problem
        except RecursionError:
            return {}, "they are nested too deeply"
        except (ValueError, OverflowError) as error:  # numbers beyond what Python writes or compares
            return {}, f"they cannot be read ({as_text(str(error), 200)})"

    async def _attempts(self, arguments: dict[str, Any], trajectory: ToolTrajectory) -> Outcome:
        """Try until something other than ``infrastructure`` comes, the attempts are used up or the tool rests."""
        attempt = 0
        while True:
            with self._breaker.call() as admitted:
                if not admitted:
                    break
                status, text = await self._attempt(arguments, trajectory)
                self.stats.rests += self._breaker.note(status)
            if status is not Status.INFRASTRUCTURE or attempt == self.limits.retries:
                return status, text
            attempt += 1
            self.stats.retried += 1
            await asyncio.sleep(_PAUSE_S * 2**attempt * random.random())
        return Status.INFRASTRUCTURE, f"Error: '{self.tool.name}' does not work at the moment. Try again later."

    async def _attempt(self, arguments: dict[str, Any], trajectory: ToolTrajectory) -> Outcome:
        name, timeout_s = self.tool.name, self.limits.timeout_s
        try:
            return Status.OK, await self._call(arguments, trajectory)
        except (BadArguments, ToolFailed) as error:
            return self._refused(error)
        except CallTimeout:
            return Status.TIMEOUT, f"Error: '{name}' did not answer within {timeout_s:g} s."
        except StateLost as error:
            return Status.INFRASTRUCTURE, f"Error: {error}."
        except Exception as error:  # a user's tool may raise anything; the rollout goes on
            return self._crashed(error)

    def _refused(self, error: BadArguments | ToolFailed) -> Outcome:
        try:
            text = f"Error: {self._text(error)}"
        except Exception as unprintable:  # the message is a user's code too
            return self._crashed(unprintable)
        return (Status.BAD_ARGUMENTS if isinstance(error, BadArguments) else Status.TOOL_FAILED), text

    def _crashed(self, error: Exception) -> Outcome:
        self._log(error)
        return Status.INFRASTRUCTURE, f"Error: '{self.tool.name}' failed ({type(error).__name__})."

    def _log(self, error: Exception) -> None:
        """Warn of a crash; with the traceback where it is the first of its kind."""
        described = traceback.format_exception_only(error)[-1].strip()  # also where str(error) fails
        logger.warning(
            "tool '%s' raised %.500s",
            self.tool.name,
            described,
            exc_info=error if type(error) not in self._seen else None,
        )
        self._seen.add(type(error))

    async def _call(self, arguments: dict[str, Any], trajectory: ToolTrajectory) -> str:
        arguments = copy.deepcopy(arguments)  # a tool may change what it is given; the record and the cache may not
        if self.tool.state is None:
            return await self._within(functools.partial(self.tool.call, **arguments))
        held = trajectory.object_of(self.tool.state)
        async with held.use(trajectory.row, self.limits.timeout_s) as value:
            try:
                return await self._within(functools.partial(self.tool.call, value, **arguments), held)
            except CallTimeout:
                held.lost = not self.tool.is_async
                raise

    async def _within(self, call: functools.partial[Any], held: OpenObject | None = None) -> str:
        """The text of ``call()`` if it comes in time."""
        self._hung = [job for job in self._hung if not job.ended]
        if len(self._hung) >= HUNG_LIMIT:
            raise RuntimeError(f"{len(self._hung)} calls of '{self.tool.name}' have never ended")
        job = LOOP.submit(self._awaiting(call)) if self.tool.is_async else THREADS.submit(self._calling(call))
        if held is not None and self.tool.is_async:
            held.last = job
        try:
            return await job.result(self.limits.timeout_s)
        except CallTimeout:
            if self.tool.is_async:
                LOOP.check(self.tool.name)
            raise
        finally:
            if job.given_up and not self.tool.is_async:
                self._hung.append(job)

    def _calling(self, call: functools.partial[Any]) -> Any:
        return lambda: self._text(_not_awaitable(call()))

    def _awaiting(self, call: functools.partial[Any]) -> Any:
        async def awaiting() -> str:
            return self._text(await call())

        return awaiting

    def _text(self, result: Any) -> str:
        return as_text(result, self._max_chars)


def _not_awaitable(result: Any) -> Any:
    """``result``, unless it is a coroutine or the like, which a decorator around an async function returns."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError("a plain function returned an awaitable; write it, and what decorates it, as async def")
    return result


def _default_limits(tool: Tool, timeout_s: float) -> CallLimits:
    at_once = CallLimits.concurrency if tool.at_once is None else tool.at_once
    retries = 0 if tool.state else CallLimits.retries
    return CallLimits(timeout_s, retries=retries, concurrency=at_once, cache=tool.pure)


def call_limits(tool: Tool, settings: RolloutSettings) -> CallLimits:
    """The limits of ``tool``: those of all tools, and over them its own of ``rltr.rollout.tool_limits``.

    A tool that says how many calls it can serve at once has no more, unless its own limits allow them.

    A tool with state is not retried unless it has ``retries`` of its own: the call may have changed the state.
    """
    own = settings.tool_limits.get(tool.name, ToolLimits())
    if own.cache and not tool.pure:
        where, fix = f"rltr.rollout.tool_limits.{tool.name}.cache", "mark it @tool(pure=True), or drop the setting."
        raise ConfigError(f"tool '{tool.name}' is not pure, so its results cannot be kept", where=where, fix=fix)
    shared = CallLimits(
        timeout_s=settings.tool_timeout_s,
        retries=0 if tool.state else settings.tool_retries,
        concurrency=settings.tool_concurrency if tool.at_once is None else min(settings.tool_concurrency, tool.at_once),
        rest_after=settings.tool_rest_after,
        rest_s=settings.tool_rest_s,
        cache=tool.pure,
    )
    limits = replace(shared, **own.model_dump(exclude_none=True))
    if tool.bound_s is not None and tool.bound_s >= limits.timeout_s:
        problem = (
            f"tool '{tool.name}' may take {tool.bound_s:g} s, but its calls are ended after {limits.timeout_s:g} s"
        )
        fix = f"lower the tool's own limit, or raise rltr.rollout.tool_limits.{tool.name}.timeout_s above it."
        raise ConfigError(problem, where=f"rltr.tool_settings.{tool.name}", fix=fix)
    return limits


def as_text(result: Any, limit: int | None = None) -> str:
    """A tool's return value as text that any UTF-8 file can hold, its middle cut beyond ``limit`` characters.

    Bytes are decoded, undecodable ones replaced. The cut comes first: it costs nothing on a result of any size.
    """
    if isinstance(result, bytes | bytearray | memoryview):
        return _cut(_bytes_cut(bytes(result), limit).decode("utf-8", "replace"), limit)
    text = _cut(str.__str__(result if isinstance(result, str) else str(result)), limit)  # of a subclass the bare text
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _cut(text: str, limit: int | None) -> str:
    if limit is None or len(text) <= limit:
        return text
    return text[: limit // 2] + _CUT + text[len(text) - limit // 2 :]


def _bytes_cut(data: bytes, limit: int | None) -> bytes:
    """Head and tail that hold more than ``limit`` characters, whatever they are encoded in."""
    most = None if limit is None else 4 * limit
    return data if most is None or len(data) <= 2 * most else data[:most] + data[len(data) - most :]
