"""R_error against the field's cases and its own rules."""

import json
from pathlib import Path

import pytest

from rltr_verl.reward_fns.error import Error, count_errors
from rltr_verl.trajectory import Observation, Status, ToolCall, Trajectory, Turn

CASES = {
    case["id"]: case["input"]
    for case in map(json.loads, (Path(__file__).parents[1] / "cases/error_penalty.jsonl").read_text().splitlines())
}


def with_status(*statuses):
    calls = tuple(ToolCall("t", {"x": index}, "") for index in range(len(statuses)))
    return Trajectory("q", (Turn("", calls=calls, observations=tuple(Observation("", item) for item in statuses)),))


def observed(text, **extra):
    messages = [
        {"role": "assistant", "content": '<tool_call>{"name": "search", "arguments": {"q": "x"}}</tool_call>'},
        {"role": "tool", "content": text, **extra},
        {"role": "assistant", "content": "<answer>"},
    ]
    return Trajectory.from_messages(messages, "q")


@pytest.mark.parametrize(
    ("name", "errors"),
    [("E01a", 0), ("E01b", 0), ("E01c", 0), ("E01d", 0), ("E01e", 1), ("E02a", 0), ("E04a", 1)],
)
def test_cases(name, errors):
    case = CASES[name]
    assert count_errors(observed(case["text"], **({"status": case["status"]} if "status" in case else {}))) == errors


@pytest.mark.parametrize(
    ("status", "charged"),
    [
        (Status.OK, False),
        (Status.UNREADABLE, True),
        (Status.UNKNOWN_TOOL, True),
        (Status.BAD_ARGUMENTS, True),
        (Status.TOOL_FAILED, False),
        (Status.TIMEOUT, False),
        (Status.INFRASTRUCTURE, False),
        (Status.NOT_EXECUTED, False),
    ],
)
def test_only_the_policys_mistakes_are_charged(status, charged):
    assert count_errors(with_status(status)) == charged


async def test_value_is_minus_mu_per_error():
    result = await Error(mu=0.5).score(with_status(Status.UNREADABLE, Status.OK, Status.BAD_ARGUMENTS), {})
    assert result.value == pytest.approx(-1.0)
    assert result.metrics == {"errors": 2.0}
