"""ToolRunner: one typed observation per call, whatever the tool does."""

from __future__ import annotations

import asyncio
import time

import pytest

from rltr_verl import ToolCall
from rltr_verl.errors import BadArguments, ToolFailed
from rltr_verl.tool_runner import ToolRunner
from rltr_verl.tooling import Tool, describe
from rltr_verl.trajectory import Status


def make(function, is_async=False) -> Tool:
    return Tool(function.__name__, describe(function), function, is_async)


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def refuse(x: str) -> str:
    """Refuse."""
    raise BadArguments("that is no date", fix="write YYYY-MM-DD.")


def break_down(x: str) -> str:
    """Fail."""
    raise ToolFailed("index is offline")


def crash(x: str) -> str:
    """Crash."""
    raise KeyError(x)


def leave(x: str) -> str:
    """Exit."""
    raise SystemExit(3)


def sleepy(x: str) -> str:
    """Sleep."""
    time.sleep(2)
    return x


async def async_sleepy(x: str) -> str:
    """Sleep."""
    await asyncio.sleep(30)
    return x


def raw(x: str) -> str:
    """Bytes."""
    return b"caf\xc3\xa9 \xff"  # type: ignore[return-value]


def call(name, **arguments) -> ToolCall:
    return ToolCall(name, arguments, "raw")


@pytest.fixture
def runner() -> ToolRunner:
    tools = [make(f) for f in (add, refuse, break_down, crash, leave, sleepy, raw)] + [make(async_sleepy, True)]
    return ToolRunner({item.name: item for item in tools}, timeout_s=0.3, max_parallel_calls=3)


CASES = [
    (call("add", a=30, b=12), Status.OK, "42"),
    (call("add", a="30", b="12"), Status.BAD_ARGUMENTS, "not of type 'integer'"),
    (call("add", a=1), Status.BAD_ARGUMENTS, "'b' is a required property"),
    (call("add", a=1, b=2, c=3), Status.BAD_ARGUMENTS, "unexpected"),
    (call("refuse", x=" "), Status.BAD_ARGUMENTS, "'x' is empty"),
    (call("refuse", x="y"), Status.BAD_ARGUMENTS, "no date"),
    (call("break_down", x="y"), Status.TOOL_FAILED, "offline"),
    (call("crash", x="y"), Status.INFRASTRUCTURE, "KeyError"),
    (call("leave", x="y"), Status.INFRASTRUCTURE, "failed"),
    (call("sleepy", x="y"), Status.TIMEOUT, "within 0.3 s"),
    (call("async_sleepy", x="y"), Status.TIMEOUT, "within 0.3 s"),
    (call("raw", x="y"), Status.OK, "café \ufffd"),
    (call("nope"), Status.UNKNOWN_TOOL, "unknown tool 'nope'"),
    (ToolCall("add", None, "{bad", "not valid JSON: Expecting value"), Status.UNREADABLE, "Expecting value"),
]


@pytest.mark.parametrize(("item", "status", "text"), CASES, ids=[f"{c.name}-{s.value}" for c, s, _ in CASES])
async def test_each_way_a_call_can_end(runner, item, status, text):
    (observation,) = await runner.run([item])
    assert observation.status is status
    assert text in observation.text


async def test_results_come_in_call_order_and_extra_calls_are_told(runner):
    seen = await runner.run([call("add", a=n, b=0) for n in range(5)])
    assert [item.text for item in seen[:3]] == ["0", "1", "2"]
    assert [item.status for item in seen[3:]] == [Status.NOT_EXECUTED] * 2
    assert "at most 3 calls" in seen[3].text


async def test_calls_of_a_turn_run_at_the_same_time():
    async def slow(x: str) -> str:
        """Wait."""
        running.append(x)
        await asyncio.sleep(0.05)
        peaks.append(len(running))
        running.remove(x)
        return x

    running: list[str] = []
    peaks: list[int] = []
    runner = ToolRunner({"slow": make(slow, True)}, timeout_s=5, max_parallel_calls=4)
    await runner.run([call("slow", x=str(n)) for n in range(4)])
    assert max(peaks) == 4


async def test_tools_outside_the_rows_selection_are_unknown(runner):
    (observation,) = await runner.run([call("add", a=1, b=2)], allowed=["refuse"])
    assert observation.status is Status.UNKNOWN_TOOL
    assert "refuse" in observation.text and "add'" in observation.text
