"""Per-tool numbers of a trajectory."""

from __future__ import annotations

from rltr_verl.tool_metrics import tool_metrics
from rltr_verl.trajectory import Observation, Status, ToolCall, Trajectory, Turn


def test_every_tool_has_its_figures_and_strangers_have_none():
    statuses = [Status.OK, Status.TIMEOUT, Status.BAD_ARGUMENTS, Status.TOOL_FAILED, Status.NOT_EXECUTED]
    names = ["search", "search", "search", "code", "search"]
    calls = tuple(ToolCall(name, {}, "") for name in names) + (ToolCall("nope", {}, ""),)
    seen = tuple(Observation("", status, seconds=2.0) for status in [*statuses, Status.UNKNOWN_TOOL])
    metrics = tool_metrics(Trajectory("q", (Turn("", calls=calls, observations=seen),)), ["search", "code", "idle"])
    search = {"calls": 3, "ok": 1, "bad_arguments": 1, "timeouts": 1, "faults": 1, "seconds": 6.0}
    code = {"calls": 1, "ok": 0, "bad_arguments": 0, "timeouts": 0, "faults": 1, "seconds": 2.0}
    expected = {"search": search, "code": code, "idle": dict.fromkeys(search, 0)}
    assert metrics == {
        f"tool/{name}/{key}": value for name, figures in expected.items() for key, value in figures.items()
    }
