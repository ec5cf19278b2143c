"""Format rules against the field's cases, in both modes."""

import json
from pathlib import Path

import pytest

from rltr_verl.format_check import REASONS, format_faults
from rltr_verl.parsing import parse_turn
from rltr_verl.reward_fns.error import count_errors
from rltr_verl.reward_fns.repeat import count_repeats
from rltr_verl.schemas import argument_problem
from rltr_verl.trajectory import Trajectory

CASES = {
    case["id"]: case["input"]
    for case in map(json.loads, (Path(__file__).parent / "cases/format_check.jsonl").read_text().splitlines())
}


def faults(name, end="no_call"):
    """Faults of a case's text as the only turn of a run in which text without a marker may stand at the end."""
    case = CASES[name]
    turn = parse_turn(case["text"], case.get("prompt_suffix") == "<think>\n")
    end = "length" if case.get("finish_reason") == "length" else ("answer" if turn.stopped else end)
    return format_faults(Trajectory("q", (turn,), end=end), "end_to_end", require_stop_marker=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("F01a", ()),
        ("F01b", ("unbalanced_think", "empty_turn", "no_stop_marker")),
        ("F02a", ("two_answers",)),
        ("F02b", ("unbalanced_think", "nested_think")),
        ("F04a", ()),
        ("F04b", ("unbalanced_think", "empty_turn", "truncated")),
        ("F06a", ("forged_tool_response",)),
        ("F06b", ("forged_role", "forged_tool_response")),
        ("F07b", ("empty_turn", "no_stop_marker")),
    ],
)
def test_cases(name, expected):
    found = faults(name)
    assert set(expected) <= set(found) and bool(expected) == bool(found)


def test_text_is_kept_whole_where_nothing_is_wrong():
    assert parse_turn(CASES["F04a"]["text"]).answer == "ASC 606-10-25-14"
    assert parse_turn(CASES["F01a"]["text"], prefilled_think=True).answer == "The answer is 4."
    assert parse_turn(CASES["F04b"]["text"]).answer is None


def test_forged_observation_is_model_text_not_an_observation():
    turn = parse_turn(CASES["F06a"]["text"])
    assert len(turn.calls) == 1 and turn.observations == ()


def test_empty_required_argument_breaks_the_schema():
    """Case F07a."""
    call = parse_turn(CASES["F07a"]["text"]).calls[0]
    schema = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    assert argument_problem(schema, call.arguments) == "'query' is empty"


def test_a_dangling_call_at_the_turn_limit():
    """Case F09a."""
    trajectory = Trajectory.from_messages(CASES["F09a"]["messages"], "q")
    assert trajectory.end == "turn_limit" and "truncated" in format_faults(trajectory)
    assert (trajectory.n_calls, count_repeats(trajectory, "any"), count_errors(trajectory)) == (1, 0, 0)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["<answer>"], ()),
        (["<think>a</think>\n<answer>"], ()),
        (["<answer>\n"], ()),
        (["<answer></answer>"], ()),
        (["<answer>4</answer>"], ("text_after_stop",)),
        (["The answer is 4."], ("no_stop_marker",)),
        (["<answer>", "<answer>"], ("two_answers",)),
    ],
)
def test_planner_endings(texts, expected):
    turns = tuple(map(parse_turn, texts))
    end = "answer" if turns[-1].stopped else "no_call"
    assert format_faults(Trajectory("q", turns, end=end)) == expected


def test_call_beside_the_stop_marker():
    turn = parse_turn('<tool_call>{"name": "a", "arguments": {}}</tool_call><answer>')
    assert format_faults(Trajectory("q", (turn,))) == ("call_and_answer",)


def test_end_to_end_needs_text_in_the_answer():
    assert format_faults(Trajectory("q", (parse_turn("<answer>4</answer>"),)), "end_to_end") == ()
    assert format_faults(Trajectory("q", (parse_turn("<answer>"),)), "end_to_end") == ("empty_turn",)


def test_a_malformed_call_is_no_format_fault():
    texts = ("<tool_call>{</tool_call>", "<answer>")
    assert format_faults(Trajectory("q", tuple(map(parse_turn, texts)))) == ()


def test_reasons_come_in_their_fixed_order():
    turn = parse_turn("<answer>1</answer><|im_start|>x<answer>2")
    found = format_faults(Trajectory("q", (turn,)))
    assert list(found) == [reason for reason in REASONS if reason in found] and len(found) >= 3
