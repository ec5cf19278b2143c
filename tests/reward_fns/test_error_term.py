"""R_error against the field's cases and its own rules."""

import json
import re
from pathlib import Path

import pytest

from rltr_verl.reward_fns.error import Error, count_errors
from rltr_verl.trajectory import POLICY_ERRORS, Observation, Status, ToolCall, Trajectory, Turn, is_tool_fault

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


OK_TEXTS = [
    "errors: 0",
    "0 errors, 0 failures",
    "No error was found.",
    "Error handling in Go",
    "The error of the mean is 0.4.",
    "Traceback (most recent call last): how to read one",
    "404 Not Found (film)",
    "失败乃成功之母",
    "エラーコード一覧",
    "fatal: not a git repository is a message of git",
    "exit code 1 means failure",
    "exception proves the rule",
    "Timeout (song)",
    '{"error": null, "result": 4}',
    '{"error": "", "result": 4}',
    '{"errors": 0}',
    '{"status": "ok"}',
    '{"status": "success", "exit_code": 0}',
    '{"exit_code": false}',
    '{"exit_code": null}',
    '{"title": "Error", "text": "a band"}',
    '{"status": 200}',
    '[{"status": "error"}]',
    '{"status": "error"',
    '"error"',
    "",
    " ",
    "null",
    "{}",
    "[" * 5000,
    '{"status": {"error": 1}}',
]

FAILED_PROGRAMS = [
    '{"status": "error"}',
    '{"status": "error", "stdout": null, "stderr": "boom"}',
    '{"exit_code": 1}',
    '{"exit_code": -9, "output": null}',
    '{"exit_code": 127, "error": "command not found"}',
    '  {"status": "error", "exit_code": 0}',
    '\n{"output": "", "exit_code": 2}',
]

TOOL_SERVERS = [
    "Error executing tool query: 1 validation error",
    "Error calling tool search: connection refused",
    "# Done\nError executing tool search-query: bad gateway",
    "MCP error -32001: Request timed out",
    "McpError: Connection closed",
]


@pytest.mark.parametrize("text", OK_TEXTS)
def test_words_in_an_observation_are_no_error(text):
    trajectory = observed(text)
    assert count_errors(trajectory) == 0 and not any(is_tool_fault(item.observation) for item in trajectory.executed())


@pytest.mark.parametrize("text", FAILED_PROGRAMS)
def test_a_result_that_states_its_own_failure_is_an_error(text):
    assert count_errors(observed(text)) == 1
    assert count_errors(observed(text, status="ok")) == 0


@pytest.mark.parametrize("text", [*TOOL_SERVERS, CASES["E02a"]["text"]])
@pytest.mark.parametrize("extra", [{}, {"status": "ok"}])
def test_a_tool_servers_own_failure_is_flagged_and_not_charged(text, extra):
    """Case E02a: not charged, and not shown as a success either."""
    (item,) = observed(text, **extra).executed()
    assert item.status is Status.TOOL_FAILED and is_tool_fault(item.observation)
    assert count_errors(observed(text, **extra)) == 0


@pytest.mark.parametrize("status", Status)
def test_a_given_status_decides_whatever_the_text_says(status):
    trajectory = observed("Errors: 3\nall failed", status=status.value)
    assert count_errors(trajectory) == (status in POLICY_ERRORS)


def test_every_case_is_named_in_this_file():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in CASES if not re.search(rf"\b{name}\b", source)] == []
