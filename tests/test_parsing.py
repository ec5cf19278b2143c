"""The parser against the field's cases, random text, and text made to be slow."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltr_verl._messages import call_status
from rltr_verl.parsing import MAX_UNREADABLE, parse_turn
from rltr_verl.schemas import schema_index
from rltr_verl.trajectory import Observation, Status, Trajectory

CASES = {
    case["id"]: case["input"]
    for case in map(json.loads, (Path(__file__).parent / "cases/parser.jsonl").read_text().splitlines())
}


def text_of(name):
    case = CASES[name]
    text = case["text"]
    if "fill" in case:
        return text.replace("{FILL}", case["fill"] * case["times"])
    if "fill_open" in case:
        return text.replace("{FILL}", case["fill_open"] * case["times"] + case["fill_close"] * case["times"])
    return text


def calls(text):
    return parse_turn(text).calls


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("P01a", [{"query": "final"}]),
        ("P01b", []),
        ("P02a", []),
        ("P04b", [{"code": "a=1\nprint(a)"}]),
        ("P06a", [{"query": "a"}, {"query": "b"}]),
        ("P07a", [{"query": "a"}, {"query": "b"}]),
        ("P09a", [{"query": "x"}]),
        ("P11b", [{"query": "what's new in O'Neil's book"}]),
        ("P17a", [{"query": "x"}]),
        ("P19a", [{"query": "\ufffd"}]),
        ("P19b", [{"query": "🍸"}]),
        ("P21a", [{"a": "30", "b": "12"}]),
        ("P21b", [{"id": 2662}]),
    ],
)
def test_readable_calls(name, arguments):
    found = calls(text_of(name))
    assert [call.arguments for call in found] == arguments
    assert all(call.error is None for call in found)


@pytest.mark.parametrize("name", ["P04a", "P11a", "P16a", "P17b", "P22a", "X01", "X02", "X04"])
def test_unreadable_blocks_are_one_call_with_the_reason(name):
    (call,) = calls(text_of(name))
    assert call.arguments is None and call.error
    assert parse_turn(text_of(name)).answer is None


def test_json_string_arguments_are_decoded_once():
    """Case P12a, and the sound form beside it."""

    def read(arguments):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "search", "arguments": arguments}}]}
        return Trajectory.from_messages([message], "q")

    bad = read(CASES["P12a"]["arguments_raw"])
    assert [item.status for item in bad.executed()] == [Status.UNREADABLE]
    good = read('{"query": "x"}')
    assert good.turns[0].calls[0].arguments == {"query": "x"}


def test_the_text_behind_the_thought_is_the_answer():
    assert parse_turn(text_of("P01b")).answer == "The answer is 4."


def test_unclosed_think_is_a_fault_and_swallows_its_calls():
    turn = parse_turn(text_of("P02a"))
    assert turn.faults == ("unbalanced_think", "empty_turn") and turn.calls == ()


def test_calls_that_do_not_fit_the_tools():
    """Cases P17a, P21a, P21b: unknown tool, and arguments of a wrong type (never converted by guessing)."""

    def schema(name, **types):
        properties = {key: {"type": kind} for key, kind in types.items()}
        return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(types)}}

    index = schema_index(
        [schema("search", query="string"), schema("add", a="integer", b="integer"), schema("lookup", id="string")]
    )
    statuses = [call_status(calls(text_of(name))[0], index) for name in ("P17a", "P21a", "P21b", "P11b")]
    assert statuses == [Status.UNKNOWN_TOOL, Status.BAD_ARGUMENTS, Status.BAD_ARGUMENTS, Status.OK]


def test_a_tag_inside_a_json_string_ends_nothing():
    text = '<tool_call>{"name": "python", "arguments": {"code": "print(\'</tool_call><think>\')"}}</tool_call>'
    assert calls(text)[0].arguments == {"code": "print('</tool_call><think>')"}


def test_a_block_of_a_good_and_a_bad_call_runs_neither():
    (call,) = calls('<tool_call>[{"name": "a", "arguments": {}}, {"name": "b"}]</tool_call>')
    assert call.arguments is None and call.name == "b"


def test_stray_closing_tag_is_an_unreadable_call():
    assert [call.error for call in calls("x</tool_call>")] == ["</tool_call> without <tool_call>"]


def test_a_stray_closing_tag_behind_many_good_calls_stays():
    good = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert len(calls(good * 100 + "</tool_call>")) == 101


@pytest.mark.parametrize("ending", ["<|im_end|>", "<|im_end|>\n", "<|endoftext|>"])
def test_the_end_of_turn_token_is_no_fault(ending):
    turn = parse_turn(f"<think>a</think><answer>{ending}")
    assert turn.faults == () and turn.stopped and turn.answer == ""


TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>", "<tool_response>", "<|im_end|>"]
JSON = ['{"name": "a", "arguments": {"x": 1}}', '{"name": "a"', "[", "]", "{", "}", '"', "\\", "NaN", "1e999", "\n"]
TEXTS = st.lists(st.sampled_from(TAGS + JSON) | st.text(max_size=8), max_size=40).map("".join)


@given(TEXTS, st.booleans())
def test_any_text_gives_a_turn(text, prefilled):
    turn = parse_turn(text, prefilled)
    assert turn.text == text
    for call in turn.calls:
        assert (call.arguments is None) == (call.error is not None)
    if not turn.calls and not turn.stopped and not turn.answer:
        assert turn.faults


@given(TEXTS)
def test_every_opened_call_outside_of_thought_stays(text):
    visible = text.replace("<think>", "").replace("</think>", "").replace("<answer>", "").replace("</answer>", "")
    assert bool(calls(visible)) == ("tool_call>" in visible and ("<tool_call>" in visible or "</tool_call>" in visible))


@given(st.lists(TEXTS, max_size=4), st.sampled_from(Status), TEXTS)
def test_trajectories_survive_json(texts, status, observed):
    turns = tuple(
        replace(turn, observations=tuple(Observation(observed, status, call.name, 0.5) for call in turn.calls))
        for turn in map(parse_turn, texts)
    )
    tools = ({"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}},)
    trajectory = Trajectory("q", turns, tools, "turn_limit")
    assert Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict()))) == trajectory


@pytest.mark.parametrize("opening", ["", "<answer>", "<think>", "<tool_call>["])
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        "</tool_call>",
        "x<tool_call>",
        "x</think>",
        "<tool_call>{",
        '<tool_call>{"name": "a", "arguments": {"x": "',
        '<tool_call>{"a": 1}</tool_call>',
        "<tool_call>[",
        "<think>",
        "</think>",
        "<answer>",
        "<answer>x</answer>",
        "<tool_response>",
        "<|im_start|>",
        "<",
        "<tool_call> ",
        '{"a":',
        "\n",
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>',
    ],
)
def test_time_is_linear_in_the_length(opening, piece):
    """One pass over 400,000 characters takes some 0.05 s here, a pass per tag takes minutes."""
    start = time.process_time()
    turn = parse_turn(opening + piece * (400_000 // len(piece)))
    assert time.process_time() - start < 5.0
    assert sum(call.error is not None for call in turn.calls) <= MAX_UNREADABLE + 1
