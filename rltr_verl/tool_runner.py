"""Runs the calls of a turn: check, time out, never raise; one typed observation per call.

Only faults that are the policy's own end in a status it is charged for; whatever happens inside a tool does not reach
the rollout as an exception.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rltr_verl.errors import BadArguments, ToolFailed
from rltr_verl.schemas import argument_problem
from rltr_verl.tooling import Tool
from rltr_verl.trajectory import Observation, Status, ToolCall

logger = logging.getLogger(__name__)


class ToolRunner:
    """Executes tool calls concurrently under one timeout.

    Args:
        tools: ``{name: Tool}`` as :func:`rltr_verl.tooling.load_tools` gives them.
        timeout_s: wall seconds for one call; a synchronous tool that hangs keeps its thread until it returns.
        max_parallel_calls: calls of one turn that run; the others get an observation that says so.
    """

    def __init__(self, tools: Mapping[str, Tool], *, timeout_s: float = 30.0, max_parallel_calls: int = 4) -> None:
        self._tools = tools
        self._timeout_s = timeout_s
        self._limit = max_parallel_calls
        self._threads = ThreadPoolExecutor(max_workers=32, thread_name_prefix="rltr-tool")

    async def run(self, calls: Sequence[ToolCall], allowed: Iterable[str] | None = None) -> tuple[Observation, ...]:
        """Observations in the order of ``calls``. ``allowed`` restricts the tools of this trajectory."""
        names = set(self._tools) if allowed is None else set(allowed) & set(self._tools)
        running = [self._one(call, names) for call in calls[: self._limit]]
        done = list(await asyncio.gather(*running))
        refused = f"Not executed: at most {self._limit} calls a turn are run. Call again in your next turn."
        done += [Observation(refused, Status.NOT_EXECUTED, call.name) for call in calls[self._limit :]]
        return tuple(done)

    async def _one(self, call: ToolCall, names: set[str]) -> Observation:
        refusal = self._refusal(call, names)
        if refusal is not None:
            return refusal
        start = time.perf_counter()
        status, text = await self._execute(self._tools[call.name or ""], call.arguments or {})
        return Observation(text, status, call.name, time.perf_counter() - start)

    def _refusal(self, call: ToolCall, names: set[str]) -> Observation | None:
        """An observation that tells the policy what is wrong with its call, or None if it can run."""
        if call.arguments is None:
            return Observation(f"Error: the call could not be read ({call.error}).", Status.UNREADABLE, call.name)
        if call.name not in names:
            text = f"Error: unknown tool '{call.name}'. Tools: {', '.join(sorted(names)) or 'none'}."
            return Observation(text, Status.UNKNOWN_TOOL, call.name)
        problem = argument_problem(self._tools[call.name].parameters, call.arguments)
        if problem:
            return Observation(f"Error: bad arguments for '{call.name}': {problem}.", Status.BAD_ARGUMENTS, call.name)
        return None

    async def _execute(self, tool: Tool, arguments: Mapping[str, Any]) -> tuple[Status, str]:
        try:
            result = await asyncio.wait_for(self._start(tool, arguments), self._timeout_s)
        except BadArguments as error:
            return Status.BAD_ARGUMENTS, f"Error: {error}"
        except ToolFailed as error:
            return Status.TOOL_FAILED, f"Error: {error}"
        except asyncio.TimeoutError:
            return Status.TIMEOUT, f"Error: '{tool.name}' did not answer within {self._timeout_s:g} s."
        except (Exception, SystemExit) as error:  # a user's tool may raise anything; the rollout goes on
            logger.warning("tool '%s' raised %s: %s", tool.name, type(error).__name__, error, exc_info=True)
            return Status.INFRASTRUCTURE, f"Error: '{tool.name}' failed ({type(error).__name__})."
        return Status.OK, as_text(result)

    def _start(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        if tool.is_async:
            return tool.call(**arguments)
        call = functools.partial(_shield_exit, functools.partial(tool.call, **arguments))
        return asyncio.get_running_loop().run_in_executor(self._threads, call)


def _shield_exit(call: Any) -> Any:
    """A SystemExit may not cross a future: the event loop would end with it."""
    try:
        return call()
    except SystemExit as error:
        raise RuntimeError(f"the tool called sys.exit({error.code})") from error


def as_text(result: Any) -> str:
    """A tool's return value as text that any UTF-8 file can hold; bytes are decoded, undecodable ones replaced."""
    if isinstance(result, bytes):
        return result.decode("utf-8", "replace")
    text = result if isinstance(result, str) else str(result)
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
