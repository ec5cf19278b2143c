"""ToolRunner: one typed observation per call, whatever the tool does."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from rltr_verl import ToolCall
from rltr_verl.config import load_settings
from rltr_verl.errors import BadArguments, ConfigError, ToolFailed
from rltr_verl.tool_guard import CallLimits
from rltr_verl.tool_runner import ToolRunner, as_text, call_limits
from rltr_verl.tooling import State, Tool, describe
from rltr_verl.trajectory import Status
from tests.fakes.clock import Clock, until


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
    time.sleep(600)  # in a daemon thread
    return x


async def async_sleepy(x: str) -> str:
    """Sleep."""
    await asyncio.sleep(600)
    return x


def raw(x: str) -> str:
    """Bytes."""
    return b"caf\xc3\xa9 \xff"  # type: ignore[return-value]


def call(name, **arguments) -> ToolCall:
    return ToolCall(name, arguments, "raw")


@pytest.fixture
def runner() -> ToolRunner:
    tools = [make(f) for f in (add, refuse, break_down, crash, leave, sleepy, raw)] + [make(async_sleepy, True)]
    limits = dict.fromkeys(("sleepy", "async_sleepy"), CallLimits(timeout_s=0.3))
    return ToolRunner({item.name: item for item in tools}, timeout_s=60, limits=limits, max_parallel_calls=3)


@pytest.fixture
async def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


CASES = [
    (call("add", a=30, b=12), Status.OK, "42"),
    (call("add", a="30", b="12"), Status.OK, "42"),
    (call("add", a="thirty", b=12), Status.BAD_ARGUMENTS, "not of type 'integer'"),
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
    async def meet(x: str) -> str:
        """Wait for the others."""
        running.append(x)
        await until(lambda: len(running) == 4)
        return x

    running: list[str] = []
    runner = ToolRunner({"meet": make(meet, True)}, timeout_s=60, max_parallel_calls=4)
    seen = await runner.run([call("meet", x=str(n)) for n in range(4)])
    assert [item.text for item in seen] == ["0", "1", "2", "3"]


async def test_tools_outside_the_rows_selection_are_unknown(runner):
    (observation,) = await runner.run([call("add", a=1, b=2)], allowed=["refuse"])
    assert observation.status is Status.UNKNOWN_TOOL
    assert "refuse" in observation.text and "add'" in observation.text


async def cleanup_forever(x: str) -> str:
    """Ignore being cancelled."""
    stop = Hold.stop
    while not stop.is_set():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
    return x


async def block(x: str) -> str:
    """Block the event loop."""
    Hold.stop.wait(60)
    Hold.blocked_until_let_go = Hold.stop.is_set()
    return x


async def async_leave(x: str) -> str:
    """Exit."""
    raise SystemExit(3)


async def cancelled(x: str) -> str:
    """Cancel itself."""
    raise asyncio.CancelledError


def impatient(x: str) -> str:
    """Time out inside."""
    raise TimeoutError("the socket")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def unprintable(x: str) -> str:
    """Raise what cannot be printed."""
    raise Unprintable


class NoText:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def no_text(x: str) -> str:
    """Return what has no text."""
    return NoText()  # type: ignore[return-value]


def runs_dry(x: str) -> str:
    """Take the first of nothing."""
    return next(iter([]))


class Nameless(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def nameless(x: str) -> str:
    """Raise what ends the process and cannot be printed."""
    raise Nameless


class Silent(BadArguments):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def silent(x: str) -> str:
    """Refuse without a text."""
    raise Silent("no")


def unawaited(x: str) -> str:
    """Return a coroutine, as a decorator around an async function does."""
    return quick(x)  # type: ignore[return-value]


class Hold:
    """Until when ``block`` and ``cleanup_forever`` go on."""

    stop = threading.Event()
    blocked_until_let_go: bool | None = None


@pytest.fixture
def hold():
    Hold.stop, Hold.blocked_until_let_go = threading.Event(), None
    yield Hold
    Hold.stop.set()


@pytest.mark.parametrize(
    ("function", "status"),
    [
        (cleanup_forever, Status.TIMEOUT),
        (block, Status.TIMEOUT),
        (async_leave, Status.INFRASTRUCTURE),
        (cancelled, Status.INFRASTRUCTURE),
        (impatient, Status.INFRASTRUCTURE),
        (unprintable, Status.INFRASTRUCTURE),
        (no_text, Status.INFRASTRUCTURE),
        (runs_dry, Status.INFRASTRUCTURE),
        (nameless, Status.INFRASTRUCTURE),
        (silent, Status.INFRASTRUCTURE),
        (unawaited, Status.INFRASTRUCTURE),
    ],
)
async def test_the_rollouts_loop_survives_and_keeps_its_time(function, status, hold):
    name, is_async = function.__name__, asyncio.iscoroutinefunction(function)
    limits = {name: CallLimits(timeout_s=0.3 if status is Status.TIMEOUT else 60)}
    runner = ToolRunner({name: make(function, is_async), "add": make(add)}, timeout_s=60, limits=limits)
    hurt, fine = await runner.run([call(name, x="y"), call("add", a=1, b=1)])
    assert (hurt.status, fine.text) == (status, "2")
    assert hold.blocked_until_let_go is None  # `block` is at it still


async def test_other_async_tools_work_again_after_one_has_blocked_their_loop(hold):
    limits = {name: CallLimits(timeout_s=0.3, retries=0, rest_after=10**9) for name in ("block", "quick")}
    runner = ToolRunner({"block": make(block, True), "quick": make(quick, True)}, limits=limits)
    await runner.run([call("block", x="y")])
    while (await runner.run([call("quick", x="y")]))[0].status is not Status.OK:  # until the loop is replaced
        assert hold.blocked_until_let_go is None
    assert hold.blocked_until_let_go is None


async def quick(x: str) -> str:
    """Answer."""
    return x


class Markup(str):
    """As markupsafe's: what it is joined with is escaped."""

    def __add__(self, other: str) -> str:
        return Markup(str(self) + other.replace(" ", "&nbsp;"))

    def __getitem__(self, key):
        return Markup(str(self)[key])


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ("x" * 100_000_000, "x ...[cut]... x"),
        ("é" * 10_000_000, "é ...[cut]... é"),
        (b"\xff" * 100_000_000, "\ufffd ...[cut]... \ufffd"),
        (b"a" + "é".encode() * 20_000_000, "é ...[cut]... é"),
        ("\ud800 lone", "? lone"),
        (memoryview(b"caf\xc3\xa9"), "café"),
        ({"a": 1}, "{'a': 1}"),
        (None, "None"),
        (Markup("<" * 2000), "< ...[cut]... <"),
    ],
)
def test_any_result_becomes_bounded_utf8_text(result, shown):
    text = as_text(result, 1000)
    assert shown in text and len(text) <= 1020 and type(text) is str
    text.encode("utf-8")


async def test_only_faults_of_the_surroundings_are_tried_again():
    tried: list[str] = []

    def flaky(kind: str) -> str:
        """Fail at first."""
        tried.append(kind)
        if len(tried) > 1:
            return "fine"
        raise {"infra": ConnectionError("reset"), "failed": ToolFailed("no"), "bad": BadArguments("no")}[kind]

    for kind, status, times in (
        ("infra", Status.OK, 2),
        ("failed", Status.TOOL_FAILED, 1),
        ("bad", Status.BAD_ARGUMENTS, 1),
    ):
        tried.clear()
        (seen,) = await ToolRunner({"flaky": make(flaky)}).run([call("flaky", kind=kind)])
        assert (seen.status, len(tried)) == (status, times)


async def test_a_tool_that_keeps_failing_rests_and_is_not_called():
    calls: list[str] = []

    def dead(x: str) -> str:
        """Fail."""
        calls.append(x)
        raise ConnectionError("refused")

    limits = {"dead": CallLimits(retries=0, rest_after=3, rest_s=60)}
    runner = ToolRunner({"dead": make(dead), "add": make(add)}, limits=limits)
    seen = [(await runner.run([call("dead", x="y")]))[0] for _ in range(6)]
    assert len(calls) == 3 and {item.status for item in seen} == {Status.INFRASTRUCTURE}
    assert "does not work at the moment" in seen[-1].text
    assert (await runner.run([call("add", a=1, b=1)]))[0].text == "2"
    assert runner.stats()["dead"]["rests"] == 1


async def test_a_tool_that_hangs_is_tried_by_one_call_after_its_rest():
    begun, release = [], threading.Event()

    def hang(x: str) -> str:
        """Hang."""
        begun.append(x)
        release.wait(120)
        return x

    limits = {"hang": CallLimits(timeout_s=0.3, retries=0, rest_after=2, rest_s=0.5)}
    runner = ToolRunner({"hang": make(hang)}, limits=limits)

    async def all_at_once() -> list[Status]:
        return [
            item.status for (item,) in await asyncio.gather(*(runner.run([call("hang", x="y")]) for _ in range(100)))
        ]

    for _ in range(2):
        await runner.run([call("hang", x="y")])
    await asyncio.sleep(0.6)
    seen = await all_at_once()
    assert seen.count(Status.INFRASTRUCTURE) == 99 and seen.count(Status.TIMEOUT) == 1
    assert len(begun) <= 3
    release.set()
    await asyncio.sleep(0.6)
    while (await runner.run([call("hang", x="y")]))[0].status is not Status.OK:
        await asyncio.sleep(0.1)


async def test_a_tools_limit_holds_over_trajectories_and_waiting_is_not_timed(clock):
    running, peaks = [], []

    async def slow(x: str) -> str:
        """Wait."""
        go = threading.Event()
        running.append(go)
        peaks.append(len(running))
        await until(go.is_set)
        running.remove(go)
        return x

    runner = ToolRunner({"slow": make(slow, True)}, limits={"slow": CallLimits(timeout_s=300, concurrency=2)})
    calls = [asyncio.create_task(runner.run([call("slow", x=str(n))])) for n in range(8)]
    for _ in range(4):
        await until(lambda: len(running) == 2 and not any(go.is_set() for go in running))
        clock.ahead += 200  # the last ones wait for 600 s
        for go in list(running):
            go.set()
    assert [item.text for (item,) in await asyncio.gather(*calls)] == [str(n) for n in range(8)]
    assert max(peaks) == 2


async def test_pure_results_are_kept_and_failures_are_not():
    calls: list[float] = []

    def half(n: float) -> str:
        """Halve."""
        calls.append(n)
        if len(calls) == 1:
            raise ToolFailed("not yet")
        return str(n / 2)

    runner = ToolRunner({"half": replace(make(half), pure=True)})
    seen = [(await runner.run([call("half", n=given)]))[0].text for given in (4, 4, 4, "4", 5)]
    assert seen[1:] == ["2.0", "2.0", "2.0", "2.5"] and calls == [4, 4, 5]
    assert runner.stats()["half"]["cached"] == 2


async def test_a_tool_that_changes_its_arguments_changes_neither_record_nor_cache():
    def total(xs: list[int]) -> str:
        """Sum."""
        found = sum(xs)
        xs.clear()
        return str(found)

    runner, asked = ToolRunner({"total": replace(make(total), pure=True)}), call("total", xs=[1, 2])
    texts = [(await runner.run([item]))[0].text for item in (asked, call("total", xs=[]), asked)]
    assert texts == ["3", "0", "3"] and asked.arguments == {"xs": [1, 2]}


async def test_whatever_a_call_is_called_its_observation_is_short_utf8(runner):
    seen = await runner.run([call("\ud800" * 10_000), ToolCall("add", None, "", "\udfff")])
    assert all(item.text.encode("utf-8") and len(item.text) < 300 for item in seen)


async def test_arguments_that_python_cannot_compare_or_write_are_refused():
    schema = {"type": "object", "properties": {"x": {"type": "number", "multipleOf": 0.5}, "y": {"type": "string"}}}
    described = {"type": "function", "function": {"name": "take", "description": "Take.", "parameters": schema}}
    runner = ToolRunner({"take": Tool("take", described, lambda **given: "taken")})
    seen = await runner.run([call("take", x=float("inf")), call("take", y=10**5000)])
    assert {item.status for item in seen} == {Status.BAD_ARGUMENTS}


async def test_hung_threads_take_nothing_from_512_trajectories(clock):
    release = threading.Event()

    def maybe_hang(x: int) -> str:
        """Hang now and then."""
        if x % 100 == 50:
            release.wait(120)
        return str(x)

    runner = ToolRunner({"maybe_hang": make(maybe_hang)}, timeout_s=600)
    calls = [asyncio.create_task(runner.run([call("maybe_hang", x=n)])) for n in range(512)]
    hung = [50, 150, 250, 350, 450]
    await until(lambda: sum(item.done() for item in calls) == 507)
    clock.ahead = 600
    seen = await asyncio.gather(*calls)
    again = await asyncio.gather(*(runner.run([call("maybe_hang", x=1)]) for _ in range(512)))
    assert not release.is_set()
    release.set()
    assert [n for n, (item,) in enumerate(seen) if item.status is Status.TIMEOUT] == hung
    assert [item.text for n, (item,) in enumerate(seen) if n not in hung] == [
        str(n) for n in range(512) if n not in hung
    ]
    assert {item.status for (item,) in again} == {Status.OK}


async def test_a_tool_whose_calls_never_end_is_refused_at_last(monkeypatch):
    monkeypatch.setattr("rltr_verl.tool_runner.HUNG_LIMIT", 2)
    release = threading.Event()

    def hang(x: str) -> str:
        """Hang."""
        release.wait(30)
        return x

    runner = ToolRunner({"hang": make(hang)}, limits={"hang": CallLimits(timeout_s=0.05, retries=0, rest_after=10**9)})
    seen = [(await runner.run([call("hang", x="y")]))[0].status for _ in range(3)]
    assert seen == [Status.TIMEOUT, Status.TIMEOUT, Status.INFRASTRUCTURE]
    release.set()
    while (await runner.run([call("hang", x="y")]))[0].status is not Status.OK:
        await asyncio.sleep(0.01)


def test_a_process_ends_although_a_tool_hangs():
    code = (
        "import asyncio, time\n"
        "from rltr_verl import ToolCall, tool\n"
        "from rltr_verl.tool_runner import ToolRunner\n"
        "from rltr_verl.tooling import Tool, describe\n"
        "def hang(x: str) -> str:\n    'Hang.'\n    time.sleep(600)\n"
        "runner = ToolRunner({'hang': Tool('hang', describe(hang), hang)}, timeout_s=0.2)\n"
        "(seen,) = asyncio.run(runner.run([ToolCall('hang', {'x': 'y'}, '')]))\n"
        "print(seen.status.value)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout.strip()) == (0, "timeout")


def test_one_runner_serves_one_event_loop_after_another():
    runner = ToolRunner({"quick": make(quick, True), "add": make(add)}, limits={"add": CallLimits(concurrency=1)})
    for _ in range(3):
        seen = asyncio.run(runner.run([call("quick", x="y"), *[call("add", a=1, b=1)] * 3]))
        assert [item.text for item in seen] == ["y", "2", "2", "2"]


def limits_of(tools, **rollout):
    return ToolRunner.from_settings(tools, load_settings({"rollout": rollout}).rollout)


def test_limits_of_the_recipe_are_checked_against_its_tools():
    tools = {"add": make(add)}
    limits_of(tools, tool_limits={"add": {"timeout_s": 1, "cache": False}})
    with pytest.raises(ConfigError, match="tool_limits: limits for 'ad', which is no tool.*add"):
        limits_of(tools, tool_limits={"ad": {"timeout_s": 1}})
    with pytest.raises(ConfigError, match="tool_limits.add.cache: tool 'add' is not pure"):
        limits_of(tools, tool_limits={"add": {"cache": True}})


def test_a_tool_that_ends_its_calls_itself_does_so_before_the_runner():
    tool = replace(make(add), bound_s=10.0)
    limits_of({"add": tool})
    limits_of({"add": tool}, tool_timeout_s=5, tool_limits={"add": {"timeout_s": 11}})
    for rollout in ({"tool_timeout_s": 10}, {"tool_limits": {"add": {"timeout_s": 5}}}):
        with pytest.raises(ConfigError, match="tool_settings.add: tool 'add' may take 10 s.*tool_limits.add.timeout_s"):
            limits_of({"add": tool}, **rollout)


def test_own_limits_of_a_tool_stand_over_those_of_all():
    settings = load_settings(
        {"rollout": {"tool_retries": 3, "tool_concurrency": 7, "tool_limits": {"add": {"retries": 0, "timeout_s": 2}}}}
    ).rollout
    pure = replace(make(add), pure=True)
    expected = CallLimits(timeout_s=2, retries=0, concurrency=7, rest_after=20, rest_s=30, cache=True)
    assert call_limits(pure, settings) == expected
    assert call_limits(make(refuse), settings).retries == 3
    assert call_limits(replace(make(refuse), state=State("s", object)), settings).retries == 0


def test_a_tool_says_how_many_calls_it_serves_at_once():
    few, settings = replace(make(add), at_once=3), load_settings({"rollout": {"tool_concurrency": 7}}).rollout
    assert call_limits(few, settings).concurrency == 3
    assert call_limits(replace(few, at_once=9), settings).concurrency == 7
    own = load_settings({"rollout": {"tool_limits": {"add": {"concurrency": 5}}}}).rollout
    assert call_limits(few, own).concurrency == 5


def test_a_forked_process_has_workers_of_its_own():
    runner = ToolRunner({"quick": make(quick, True), "add": make(add)})
    calls = [call("quick", x="y"), call("add", a=1, b=1)]
    asyncio.run(runner.run(calls))
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(runner, calls))
    process.start()
    process.join(60)
    assert process.exitcode == 0


def _in_child(runner, calls):
    assert [item.text for item in asyncio.run(runner.run(calls))] == ["y", "2"]


async def test_arguments_nested_beyond_all_bounds_are_the_policys_mistake():
    def take(x: list) -> str:
        """Take."""
        return "ok"

    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    (seen,) = await ToolRunner({"take": replace(make(take), pure=True)}).run([call("take", x=deep)])
    assert seen.status is Status.BAD_ARGUMENTS and "nested too deeply" in seen.text
