"""R_repeat against the field's cases and its own rules."""

import json
from pathlib import Path

import pytest

from rltr_verl.reward_fns.repeat import Repeat, count_repeats
from rltr_verl.trajectory import Observation, Status, ToolCall, Trajectory, Turn

CASES = {
    case["id"]: case["input"]
    for case in map(json.loads, (Path(__file__).parents[1] / "cases/repeat_penalty.jsonl").read_text().splitlines())
}


def turn(*calls, statuses=None):
    made = tuple(ToolCall(call["name"], call["arguments"], json.dumps(call)) for call in calls)
    statuses = statuses or [Status.OK] * len(made)
    return Turn("", calls=made, observations=tuple(Observation("r", status) for status in statuses))


def trajectory(*turns):
    return Trajectory("q", turns)


def call(name, **arguments):
    return {"name": name, "arguments": arguments}


def of_case(name):
    """One call a turn; a nested list is one turn of several calls."""
    case = CASES[name]
    dropped = case.get("dropped", [])
    turns = []
    for index, item in enumerate(case["calls"]):
        calls = item if isinstance(item, list) else [item]
        status = Status.NOT_EXECUTED if index in dropped else Status.OK
        turns.append(turn(*calls, statuses=[status] * len(calls)))
    return trajectory(*turns)


@pytest.mark.parametrize(
    ("name", "consecutive", "anywhere"),
    [
        ("R01a", 1, 1),
        ("R01b", 1, 1),
        ("R02a", 0, 0),
        ("R04a", 2, 2),
        ("R04b", 0, 0),
        ("R06b", 0, 2),
        ("R07a", 0, 0),
        ("X06", 3, 3),
    ],
)
def test_cases(name, consecutive, anywhere):
    assert count_repeats(of_case(name)) == consecutive
    assert count_repeats(of_case(name), "any") == anywhere


@pytest.mark.parametrize("status", [Status.TIMEOUT, Status.TOOL_FAILED, Status.INFRASTRUCTURE])
@pytest.mark.parametrize("scope", ["consecutive", "any"])
def test_retry_after_a_tool_side_fault_is_no_repeat(status, scope):
    """Case R06a."""
    calls = CASES["R06a"]["calls"]
    first, second = turn(calls[0], statuses=[status]), turn(calls[1])
    assert count_repeats(trajectory(first, second), scope) == 0
    assert count_repeats(trajectory(first, second, turn(calls[1])), scope) == 1


def test_retry_after_the_policys_own_mistake_is_a_repeat():
    bad = turn(call("search", q="x"), statuses=[Status.BAD_ARGUMENTS])
    assert count_repeats(trajectory(bad, bad)) == 1


def test_a_call_repeated_within_a_turn_counts_once_per_copy():
    assert count_repeats(trajectory(turn(*[call("a", x=1)] * 3))) == 2


def test_a_call_that_was_not_executed_is_not_remembered():
    dropped = turn(call("a", x=1), statuses=[Status.NOT_EXECUTED])
    assert count_repeats(trajectory(dropped, turn(call("a", x=1)))) == 0


def test_unreadable_calls_repeat_by_their_text():
    def unreadable(raw):
        return Turn("", calls=(ToolCall("s", None, raw, "bad"),), observations=(Observation("", Status.UNREADABLE),))

    assert count_repeats(trajectory(unreadable("{a"), unreadable("{a"), unreadable("{b"))) == 1


@pytest.mark.parametrize(
    ("settings", "value"),
    [({}, -0.3), ({"lambda_": 1.0}, -3.0), ({"cap": 0.25}, -0.25), ({"lambda_": 0.0}, 0.0), ({"cap": 9.0}, -0.3)],
)
async def test_value(settings, value):
    term = Repeat(**settings)
    result = await term.score(trajectory(*[turn(call("a", x=1))] * 4), {})
    assert result.value == pytest.approx(value)
    assert result.metrics == {"repeats": 3.0}
