"""R_repeat against the field's cases and its own rules."""

import json
import re
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


SAME = [
    ({"q": "x"}, {"q": " x "}),
    ({"q": "a b"}, {"q": "a  \n b"}),
    ({"q": "a b"}, {"q": "a\u3000b"}),
    ({"q": "a b"}, {"q": "a\u00a0b"}),
    ({"q": "ＡＢＣ１２３"}, {"q": "ABC123"}),
    ({"q": "ﬁn"}, {"q": "fin"}),
    ({"q": "e\u0301"}, {"q": "é"}),
    ({"n": 1}, {"n": 1.0}),
    ({"n": -0.0}, {"n": 0}),
    ({"n": 10**20}, {"n": 1e20}),
    ({"a": 1, "b": [1, {"c": 2, "d": 3}]}, {"b": [1.0, {"d": 3, "c": 2}], "a": 1}),
    ({}, {}),
    ({"q": None}, {"q": None}),
]

DIFFERENT = [
    ({"q": "x"}, {"q": "X"}),
    ({"q": "x"}, {"q": "x."}),
    ({"q": "ab"}, {"q": "a b"}),
    ({"q": "x"}, {"query": "x"}),
    ({"q": "x"}, {"q": "x", "k": None}),
    ({"n": 1}, {"n": "1"}),
    ({"n": 1}, {"n": True}),
    ({"n": 0}, {"n": False}),
    ({"n": 1}, {"n": 1.5}),
    ({"n": None}, {"n": "None"}),
    ({"n": None}, {}),
    ({"n": ""}, {"n": None}),
    ({"l": [1, 2]}, {"l": [2, 1]}),
    ({"l": [1]}, {"l": 1}),
    ({"l": []}, {"l": {}}),
    ({"q": "true"}, {"q": True}),
    ({"q": "s:x"}, {"q": "x"}),
    ({"q": "中国"}, {"q": "中國"}),
]


@pytest.mark.parametrize(("first", "second"), SAME)
def test_the_same_call_in_other_words(first, second):
    """Case X06, and more of its kind."""
    assert count_repeats(trajectory(turn(call("a", **first)), turn(call("a", **second)))) == 1


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_another_call(first, second):
    assert count_repeats(trajectory(turn(call("a", **first)), turn(call("a", **second))), "any") == 0


def test_another_tool_is_another_call():
    assert count_repeats(trajectory(turn(call("a", q="x"), call("b", q="x"), call("A", q="x"))), "any") == 0


PATTERNS = [
    ("aa", 1, 1),
    ("aba", 0, 1),
    ("aab", 1, 1),
    ("abab", 0, 2),
    ("aaaa", 3, 3),
    ("abcabc", 0, 3),
    ("aabbcc", 3, 3),
    ("abba", 1, 2),
    ("a", 0, 0),
    ("", 0, 0),
    ("abcd", 0, 0),
    ("abcdaaaa", 3, 4),
]


@pytest.mark.parametrize(("letters", "consecutive", "anywhere"), PATTERNS)
def test_patterns_of_one_call_a_turn(letters, consecutive, anywhere):
    walked = trajectory(*(turn(call(letter)) for letter in letters))
    assert (count_repeats(walked), count_repeats(walked, "any")) == (consecutive, anywhere)


def test_arguments_as_text_and_as_an_object_are_the_same_call():
    texts = [{"q": "x"}, json.dumps({"q": "x"}), '{ "q":\n"x" }']
    raws = [f"<tool_call>{json.dumps({'name': 'a', 'arguments': item})}</tool_call>" for item in texts]
    messages = [
        item for raw in raws for item in ({"role": "assistant", "content": raw}, {"role": "tool", "content": ""})
    ]
    assert count_repeats(Trajectory.from_messages(messages, "q")) == 2


def test_every_case_is_named_in_this_file():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in CASES if not re.search(rf"\b{name}\b", source)] == []
