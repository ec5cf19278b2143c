"""Tools with state: one object a trajectory, opened once, closed whatever happens."""

from __future__ import annotations

import asyncio
import gc
import textwrap
import threading
import time

import pytest

from rltr_verl import ToolCall, tool_state
from rltr_verl.errors import ConfigError, ToolDefinitionError
from rltr_verl.tool_guard import CallLimits
from rltr_verl.tool_runner import ToolRunner
from rltr_verl.tooling import State, Tool, load_file, load_tools
from rltr_verl.trajectory import Status
from tests.fakes.clock import Clock, until

NOTEPAD = '''
import threading, time
from rltr_verl import tool

LOG = []
HANGS, RELEASE = threading.Event(), threading.Event()

@tool
class Notepad:
    """Lines of one trajectory."""

    def __init__(self, *, prefix: str = ""):
        self.prefix, self.lines = prefix, []

    async def open(self, row):
        LOG.append(("open", row.get("index")))

    @tool
    def write(self, text: str) -> str:
        """Write a line.

        Args:
            text: the line.
        """
        before = len(self.lines)
        time.sleep(0.01)
        assert len(self.lines) == before, "two calls at once"
        self.lines.append(self.prefix + text)
        return str(len(self.lines))

    @tool
    async def read(self) -> str:
        """Read all lines."""
        return "|".join(self.lines)

    @tool
    def hang(self) -> str:
        """Hang until released."""
        HANGS.set()
        RELEASE.wait(60)
        LOG.append("hung")
        return ""

    def close(self):
        LOG.append(("close", list(self.lines)))
'''


def load(tmp_path, source=NOTEPAD, settings=None):
    path = tmp_path / "pad.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    tools = load_tools([str(path)], settings)
    return tools, getattr(module_of(tmp_path), "LOG", None)


def module_of(tmp_path):
    return load_file(str(tmp_path / "pad.py"), "test")


def call(name, **arguments) -> ToolCall:
    return ToolCall(name, arguments, "raw")


async def test_calls_of_a_trajectory_share_an_object_and_others_do_not_see_it(tmp_path):
    tools, log = load(tmp_path, settings={"Notepad": {"prefix": "> "}})
    runner = ToolRunner(tools)

    async def trajectory(index: int) -> str:
        async with runner.trajectory({"index": index}) as opened:
            await runner.run([call("write", text=f"{index}a"), call("write", text=f"{index}b")], trajectory=opened)
            (seen,) = await runner.run([call("read")], trajectory=opened)
            return seen.text

    texts = await asyncio.gather(*(trajectory(index) for index in range(20)))
    assert texts == [f"> {index}a|> {index}b" for index in range(20)]
    assert sorted(item for item in log if item[0] == "open") == [("open", index) for index in range(20)]
    assert sum(item[0] == "close" for item in log) == 20


async def test_a_trajectory_without_calls_opens_nothing(tmp_path):
    tools, log = load(tmp_path)
    async with ToolRunner(tools).trajectory():
        pass
    assert log == []


@pytest.mark.parametrize("ending", [RuntimeError, asyncio.CancelledError])
async def test_objects_are_closed_when_the_trajectory_fails_or_is_cancelled(tmp_path, ending):
    tools, log = load(tmp_path)
    runner = ToolRunner(tools)
    with pytest.raises(ending):
        async with runner.trajectory() as opened:
            await runner.run([call("write", text="x")], trajectory=opened)
            raise ending
    assert log[-1] == ("close", ["x"])


async def test_a_trajectory_cancelled_in_the_middle_of_a_call_closes_its_object(tmp_path):
    tools, log = load(tmp_path)
    runner = ToolRunner(tools, timeout_s=30)

    async def trajectory() -> None:
        async with runner.trajectory() as opened:
            await runner.run([call("write", text="x")], trajectory=opened)
            await runner.run([call("hang")], trajectory=opened)

    task = asyncio.create_task(trajectory())
    while not module_of(tmp_path).HANGS.is_set():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log[-1] == ("close", ["x"]) and "hung" not in log
    module_of(tmp_path).RELEASE.set()


async def test_an_object_that_a_call_still_uses_is_not_entered_again(tmp_path):
    tools, log = load(tmp_path)
    runner = ToolRunner(tools, timeout_s=60, limits={"hang": CallLimits(timeout_s=0.3, retries=0)})
    async with runner.trajectory() as opened:
        await runner.run([call("read")], trajectory=opened)  # opens it, with time enough
        (hung,) = await runner.run([call("hang")], trajectory=opened)
        (after,) = await runner.run([call("write", text="x")], trajectory=opened)
    assert (hung.status, after.status) == (Status.TIMEOUT, Status.INFRASTRUCTURE)
    assert "still busy" in after.text
    assert log[-1] == ("close", []) and "hung" not in log  # nothing of this waited for the call to end
    module_of(tmp_path).RELEASE.set()


@pytest.mark.parametrize("turns", range(4))
async def test_an_object_made_while_its_trajectory_is_cancelled_is_closed(turns):
    log = []

    class Made:
        def __init__(self):
            log.append("made")

    state = State("S", Made, close=lambda made: log.append("closed"))
    schema = {"type": "function", "function": {"name": "use", "description": "Use.", "parameters": {"type": "object"}}}
    runner = ToolRunner({"use": Tool("use", schema, lambda made: "used", state=state)})
    task = asyncio.create_task(runner.run([call("use")]))
    while not log:
        await asyncio.sleep(0)
    time.sleep(0.05)  # its thread has handed the object over; this loop has not seen it yet
    for _ in range(turns):  # the result is on its way, then there, then taken
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(1000):  # it closes in a thread
        if "closed" not in log:
            await asyncio.sleep(0.01)
    assert log == ["made", "closed"]


@pytest.mark.parametrize("ends", [True, False])
async def test_an_object_is_not_entered_or_closed_while_a_cancelled_coroutine_ends(ends, monkeypatch):
    clock = Clock(monkeypatch)
    monkeypatch.setattr(tool_state, "_CANCEL_S", 20.0 if ends else 0.2)
    log, release = [], threading.Event()

    async def use(made):
        log.append("in")
        try:
            await asyncio.sleep(600)
        finally:
            for _ in range(10):
                await asyncio.sleep(0.01)
            while not (ends or release.is_set()):
                await asyncio.sleep(0.01)
            log.append("out")

    state = State("S", object, close=lambda made: log.append("closed"))
    schema = {"type": "function", "function": {"name": "use", "description": "Use.", "parameters": {"type": "object"}}}
    tools = {"use": Tool("use", schema, use, is_async=True, state=state)}
    calls = asyncio.create_task(ToolRunner(tools, timeout_s=600).run([call("use"), call("use")]))
    await until(lambda: log == ["in"])
    clock.ahead += 600
    if ends:
        await until(lambda: log == ["in", "out", "in"])
        clock.ahead += 600
    first, second = await calls
    assert first.status is Status.TIMEOUT
    if ends:
        assert second.status is Status.TIMEOUT and log == ["in", "out", "in", "out", "closed"]
    else:
        assert second.status is Status.INFRASTRUCTURE and log == ["in", "closed"]
    release.set()


FRAGILE = '''
from rltr_verl import tool

LOG = []

@tool
class Fragile:
    def open(self, row):
        LOG.append("open")
        if len(LOG) < 3:
            raise OSError("not yet")

    @tool
    def use(self) -> str:
        """Use it."""
        LOG.append("use")
        return "fine"

    def close(self):
        LOG.append("close")
        raise OSError("cannot close")
'''


async def test_failing_to_open_is_a_fault_and_the_next_call_tries_again(tmp_path):
    tools, log = load(tmp_path, FRAGILE)
    runner = ToolRunner(tools)
    async with runner.trajectory() as opened:
        (first,) = await runner.run([call("use")], trajectory=opened)
        (second,) = await runner.run([call("use")], trajectory=opened)
    assert (first.status, second.status) == (Status.INFRASTRUCTURE, Status.OK)
    assert log == ["open", "close", "open", "use", "close"]


async def test_calls_on_state_are_tried_once_unless_asked_otherwise(tmp_path):
    tools, log = load(tmp_path, FRAGILE)
    (seen,) = await ToolRunner(tools, limits={"use": CallLimits(retries=1)}).run([call("use")])
    assert seen.status is Status.OK and log.count("open") == 2


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("class A:\n    def f(self) -> str:\n        return ''", "without a method under @tool"),
        (
            "class A:\n    def __init__(self, x: int): pass\n    @tool\n    def f(self) -> str:\n        'F.'",
            "takes 'x'",
        ),
        ("class A:\n    @tool\n    def f(self, x) -> str:\n        'F.'", "no type for 'x'"),
        ("class A:\n    @tool\n    def f(self, x: int) -> str:\n        pass", "no docstring"),
        ("class A:\n    @tool\n    def f(self, *, x: int) -> str:\n        'F.'", "method with settings"),
        ("class A:\n    @tool\n    @staticmethod\n    def f(x: int) -> str:\n        'F.'", "static or class method"),
        (
            "class A:\n    @classmethod\n    @tool\n    def f(cls, x: int) -> str:\n        'F.'",
            "static or class method",
        ),
        ("class A:\n    @tool(pure=True)\n    def f(self) -> str:\n        'F.'", "not pure"),
    ],
)
def test_classes_that_are_no_tools_are_refused_with_file_and_line(tmp_path, body, problem):
    with pytest.raises(ToolDefinitionError, match=rf"pad\.py:\d+: .*{problem}"):
        load(tmp_path, f"from rltr_verl import tool\n\n@tool\n{body}\n")


def test_methods_under_tool_in_a_plain_class_do_not_vanish(tmp_path):
    with pytest.raises(ToolDefinitionError, match=r"pad\.py:3: .*'A' has methods under @tool"):
        load(tmp_path, "from rltr_verl import tool\n\nclass A:\n    @tool\n    def f(self) -> str:\n        'F.'\n")


def test_settings_of_a_class_are_checked(tmp_path):
    with pytest.raises(
        ConfigError, match=r"rltr.tool_settings.Notepad: unknown setting 'prefx'.*did you mean 'prefix'"
    ):
        load(tmp_path, settings={"Notepad": {"prefx": 1}})


SLOW_TO_GO = '''
import threading
from rltr_verl import tool
from rltr_verl.errors import ToolFailed

LOG, RELEASE = [], threading.Event()

class Slow:
    def __del__(self):
        LOG.append(threading.get_ident())
        RELEASE.wait(60)

@tool
def leaves(x: str) -> str:
    """Leave something in its locals."""
    slow = Slow()
    return x

@tool
def fails(x: str) -> str:
    """Fail with something in its locals."""
    slow = Slow()
    raise ToolFailed(x)

@tool
class Holder:
    def __init__(self):
        self.slow = Slow()

    @tool
    async def holds(self) -> str:
        """Hold."""
        return "held"
'''


@pytest.mark.parametrize("name", ["leaves", "fails", "holds"])
async def test_what_takes_its_time_to_be_freed_does_not_stop_the_rollout(tmp_path, name):
    tools, freed_in = load(tmp_path, SLOW_TO_GO)
    runner = ToolRunner(tools, limits={name: CallLimits(timeout_s=0.3, retries=0)})
    await runner.run([call(name) if name == "holds" else call(name, x="y")])
    while not freed_in:
        gc.collect()
        await asyncio.sleep(0.01)
    assert threading.get_ident() not in freed_in
    module_of(tmp_path).RELEASE.set()
