"""verl's own tools under our runner."""

from __future__ import annotations

import sys
import textwrap

import pytest

from rltr_verl import ToolCall
from rltr_verl.errors import ConfigError
from rltr_verl.tool_runner import ToolRunner
from rltr_verl.tooling import load_tools
from rltr_verl.trajectory import Status

FUNCTIONS = '''
import asyncio
from verl.tools.function_tool import function_tool

@function_tool
def area(width: int, height: int):
    """Area of a rectangle.

    Args:
        width: one side.
        height: the other.
    """
    return {"area": width * height}, 0.5

@function_tool("shout")
async def loud(text: str) -> str:
    """Shout.

    Args:
        text: what.
    """
    await asyncio.sleep(0)
    return text.upper()
'''

COUNTER = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

LOG = []

class Counter(BaseTool):
    async def create(self, instance_id=None, **kwargs):
        LOG.append(("create", kwargs["create_kwargs"]))
        self.counts = getattr(self, "counts", {})
        name = f"i{len(self.counts)}"
        self.counts[name] = kwargs["create_kwargs"].get("start", 0)
        return name, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        if parameters["by"] < 0:
            raise ValueError("negative")
        self.counts[instance_id] += parameters["by"] * self.config["scale"]
        return ToolResponse(text=str(self.counts[instance_id])), 0.0, {}

    async def release(self, instance_id, **kwargs):
        LOG.append(("release", instance_id))
"""

YAML = """
tools:
  - class_name: rltr_test_counter.Counter
    config: {type: native, scale: 10}
    tool_schema:
      type: function
      function:
        name: count
        description: Count.
        parameters:
          type: object
          properties: {by: {type: integer, description: how far.}}
          required: [by]
"""


@pytest.fixture
def yaml_file(tmp_path, monkeypatch):
    (tmp_path / "rltr_test_counter.py").write_text(textwrap.dedent(COUNTER))
    (tmp_path / "tools.yaml").write_text(YAML)
    monkeypatch.syspath_prepend(tmp_path)
    yield str(tmp_path / "tools.yaml")
    sys.modules.pop("rltr_test_counter", None)


def call(name, **arguments) -> ToolCall:
    return ToolCall(name, arguments, "raw")


async def test_function_tools_of_a_file(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    tools = load_tools(["calculator", str(path)])
    assert list(tools) == ["calculator", "area", "shout"] == list(load_tools(["calculator", str(path)]))
    assert tools["area"].parameters["required"] == ["width", "height"]
    runner = ToolRunner(tools)
    calls = [call("area", width=3, height="4"), call("shout", text="hi"), call("area", width=3)]
    seen = await runner.run([*calls, call("shout", text="hi", loud="yes")])
    assert [item.status for item in seen] == [Status.OK, Status.OK, Status.BAD_ARGUMENTS, Status.BAD_ARGUMENTS]
    assert [item.text for item in seen[:2]] == ['{"area": 12}', "HI"]


async def test_a_base_tool_lives_as_long_as_its_trajectory(yaml_file):
    tools = load_tools([yaml_file])
    log = sys.modules["rltr_test_counter"].LOG
    runner = ToolRunner(tools)
    row = {"tools_kwargs": {"count": {"create_kwargs": {"start": 5}}}}
    async with runner.trajectory(row) as first, runner.trajectory() as second:
        (a,) = await runner.run([call("count", by=1)], trajectory=first)
        (b,) = await runner.run([call("count", by=1)], trajectory=first)
        (c,) = await runner.run([call("count", by=1)], trajectory=second)
        (d,) = await runner.run([call("count", by=-1)], trajectory=second)
    assert [item.text for item in (a, b, c)] == ["15", "25", "10"]
    assert d.status is Status.INFRASTRUCTURE
    assert log[:2] == [("create", {"start": 5}), ("create", {})]
    assert sorted(log[2:]) == [("release", "i0"), ("release", "i1")]


def test_files_that_verl_cannot_load_are_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="rltr.tools: no file"):
        load_tools([str(tmp_path / "absent.yaml")])
    path = tmp_path / "wrong.yaml"
    path.write_text("tools:\n  - class_name: no_such_module_here.Tool\n    config: {type: native}\n")
    with pytest.raises(ConfigError, match=r"wrong\.yaml: verl cannot make its tools"):
        load_tools([str(path)])


def test_names_of_verls_tools_clash_with_ours_too(tmp_path, yaml_file):
    path = tmp_path / "mine.py"
    path.write_text("from rltr_verl import tool\n\n@tool\ndef count(by: int) -> str:\n    'Mine.'\n    return ''\n")
    with pytest.raises(ConfigError, match=r"two tools are called 'count' \(.*mine.py:3 and .*tools.yaml\)"):
        load_tools([str(path), yaml_file])
