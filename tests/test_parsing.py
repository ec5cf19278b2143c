"""The parser against the field's cases, random text, and text made to be slow."""

import json
import re
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
    """Cases P17a, P21a, P21b: unknown tool; "30" for an integer and 2662 for a text are the one safe coercion."""

    def schema(name, **types):
        properties = {key: {"type": kind} for key, kind in types.items()}
        return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(types)}}

    index = schema_index(
        [schema("search", query="string"), schema("add", a="integer", b="integer"), schema("lookup", id="string")]
    )
    statuses = [call_status(calls(text_of(name))[0], index) for name in ("P17a", "P21a", "P21b", "P11b")]
    assert statuses == [Status.UNKNOWN_TOOL, Status.OK, Status.OK, Status.OK]
    (wrong,) = calls('<tool_call>{"name": "add", "arguments": {"a": "thirty", "b": 1}}</tool_call>')
    assert call_status(wrong, index) is Status.BAD_ARGUMENTS


def test_a_tag_inside_a_json_string_ends_nothing():
    text = '<tool_call>{"name": "python", "arguments": {"code": "print(\'</tool_call><think>\')"}}</tool_call>'
    assert calls(text)[0].arguments == {"code": "print('</tool_call><think>')"}


def test_a_block_of_a_good_and_a_bad_call_runs_neither():
    (call,) = calls('<tool_call>[{"name": "a", "arguments": {}}, {"name": "b"}]</tool_call>')
    assert call.arguments is None and call.name == "b"


def test_stray_closing_tag_is_an_unreadable_call():
    assert [call.error for call in calls("x</tool_call>")] == ["</tool_call> without its opening tag"]


def test_a_stray_closing_tag_behind_many_good_calls_stays():
    good = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert len(calls(good * 100 + "</tool_call>")) == 101


@pytest.mark.parametrize("ending", ["<|im_end|>", "<|im_end|>\n", "<|endoftext|>"])
def test_the_end_of_turn_token_is_no_fault(ending):
    turn = parse_turn(f"<think>a</think><answer>{ending}")
    assert turn.faults == () and turn.stopped and turn.answer == ""


def c(arguments, name="search"):
    """A call as JSON text."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def b(inside):
    return f"<tool_call>{inside}</tool_call>"


X = {"query": "x"}

READABLE = {
    "qwen3, thought first": ("<think>\nI search.\n</think>\n\n" + b("\n" + c(X) + "\n") + "<|im_end|>", [X]),
    "qwen3, empty thought": ("<think>\n\n</think>\n\n" + b(c(X)), [X]),
    "qwen2.5, words first": ("Let me look that up.\n" + b("\n" + c(X) + "\n"), [X]),
    "qwen2.5, two blocks": (b(c(X)) + "\n" + b(c({"query": "y"})) + "<|im_end|>\n<|endoftext|>", [X, {"query": "y"}]),
    "words between blocks": (b(c(X)) + " and then " + b(c({"query": "y"})), [X, {"query": "y"}]),
    "hermes, arguments first": (b('{"arguments": {"query": "x"}, "name": "search"}'), [X]),
    "hermes, pretty printed": (b('{\n  "name": "search",\n  "arguments": {\n    "query": "x"\n  }\n}'), [X]),
    "tabs and carriage returns": (b('\r\n\t{"name":\t"search",\r\n"arguments": {"query": "x"}}\r\n'), [X]),
    "further keys": (b('{"id": 1, "type": "function", "name": "search", "arguments": {"query": "x"}}'), [X]),
    "arguments as text": (b(r'{"name": "search", "arguments": "{\"query\": \"x\"}"}'), [X]),
    "parameters as text": (b(r'{"name": "search", "parameters": "{\"query\": \"x\"}"}'), [X]),
    "no arguments needed": (b('{"name": "now", "arguments": {}}'), [{}]),
    "nested braces": (b(c({"filter": {"a": {"b": [{"c": "}{"}]}}})), [{"filter": {"a": {"b": [{"c": "}{"}]}}}]),
    "braces in a string": (b(c({"query": "}}]]{{"})), [{"query": "}}]]{{"}]),
    "closing tag in a string": (b(c({"query": "</tool_call>"})), [{"query": "</tool_call>"}]),
    "opening tag in a string": (b(c({"query": "<tool_call>{}"})), [{"query": "<tool_call>{}"}]),
    "stop marker in a string": (b(c({"query": "<answer>4</answer>"})), [{"query": "<answer>4</answer>"}]),
    "thought in a string": (b(c({"query": "<think>"})), [{"query": "<think>"}]),
    "foreign call in a string": (b(c({"code": "<function=f></function>"})), [{"code": "<function=f></function>"}]),
    "role token in a string": (b(c({"query": "<|im_start|>"})), [{"query": "<|im_start|>"}]),
    "quotes": (b(r'{"name": "search", "arguments": {"query": "say \"hi\" \\ bye"}}'), [{"query": 'say "hi" \\ bye'}]),
    "escaped newline": (b(r'{"name": "python", "arguments": {"code": "a\nb"}}'), [{"code": "a\nb"}]),
    "raw tab": (b('{"name": "python", "arguments": {"code": "if x:\n\ty"}}'), [{"code": "if x:\n\ty"}]),
    "chinese": (b(c({"query": "北京的人口，2023年"})), [{"query": "北京的人口，2023年"}]),
    "chinese, escaped": (b(r'{"name": "search", "arguments": {"query": "\u5317\u4eac"}}'), [{"query": "北京"}]),
    "arabic and combining": (b(c({"query": "القاهرة e\u0301"})), [{"query": "القاهرة e\u0301"}]),
    "emoji with joiner": (b(c({"query": "👩‍🔬"})), [{"query": "👩‍🔬"}]),
    "lone surrogate, raw": (b('{"name": "search", "arguments": {"query": "\ud800"}}'), [{"query": "\ufffd"}]),
    "null, true, numbers": (b(c({"a": None, "b": True, "c": -1.5e-3})), [{"a": None, "b": True, "c": -0.0015}]),
    "longest integer": (b('{"name": "a", "arguments": {"x": -' + "9" * 300 + "}}"), [{"x": -(10**300 - 1)}]),
    "large integer": (b(c({"id": 2**80})), [{"id": 2**80}]),
    "list of one": (b("[" + c(X) + "]"), [X]),
    "list of three": (b("[" + ", ".join([c(X)] * 3) + "]"), [X] * 3),
    "three objects, no comma": (b("\n".join([c(X)] * 3)), [X] * 3),
    "a draft, then the call": (f"<think>{b(c({'query': 'draft'}))}</think>{b(c(X))}", [X]),
    "two thoughts": (f"<think>a</think><think>{b(c({'query': 'no'}))}</think>{b(c(X))}", [X]),
    "thought behind the call": (f"{b(c(X))}<think>{b(c({'query': 'no'}))}</think>", [X]),
    "drafts before a stray </think>": (f"{b(c({'query': 'draft'}))}</think>{b(c(X))}", [X]),
    "deep but not too deep": (b(c({"x": json.loads("[" * 40 + "]" * 40)})), [{"x": json.loads("[" * 40 + "]" * 40)}]),
    "name with a space around": (b('{"name": " search ", "arguments": {"query": "x"}}'), [X]),
    "llama, end of turn": (b(c(X)) + "<|eot_id|>", [X]),
    "glm, end of turn": (b(c(X)) + "<|observation|>", [X]),
    "deepseek, end of turn": (b(c(X)) + "<｜end▁of▁sentence｜>", [X]),
    "a less-than sign in prose": ("if a < b and <b>bold</b>: " + b(c(X)), [X]),
}

UNREADABLE = {
    "missing brace": (b('{"name": "search", "arguments": {"query": "x"}'), "not valid JSON"),
    "one brace too many": (b(c(X) + "}"), "text after the JSON value"),
    "trailing comma": (b('{"name": "search", "arguments": {"query": "x",}}'), "not valid JSON"),
    "single quotes": (b("{'name': 'search', 'arguments': {}}"), "not valid JSON"),
    "python literals": (b('{"name": "search", "arguments": {"all": True}}'), "not valid JSON"),
    "comment": (b('{"name": "search", // look\n"arguments": {}}'), "not valid JSON"),
    "NaN": (b('{"name": "add", "arguments": {"a": NaN}}'), "NaN is not JSON"),
    "infinity": (b('{"name": "add", "arguments": {"a": -Infinity}}'), "-Infinity is not JSON"),
    "number out of range": (b('{"name": "add", "arguments": {"a": 1e999}}'), "out of range"),
    "a fraction of many digits": (
        b('{"name": "add", "arguments": {"a": 0.' + "9" * 400 + "}}"),
        "more than 300 digits",
    ),
    "name twice": (b('{"name": "a", "name": "b", "arguments": {}}'), "same key twice"),
    "empty block": (b(""), "no JSON object"),
    "blank block": (b(" \n"), "no JSON object"),
    "empty list": (b("[]"), "holds no call"),
    "empty object": (b("{}"), 'needs a "name"'),
    "prose": (b("search for x"), "no JSON object"),
    "a string": (b('"search"'), "no JSON object"),
    "list of strings": (b('["search"]'), "must be a JSON object"),
    "code fence": (b("```json\n" + c(X) + "\n```"), "no JSON object"),
    "words before": (b("Calling: " + c(X)), "no JSON object"),
    "words behind": (b(c(X) + " done"), "text after the JSON value"),
    "no arguments": (b('{"name": "search"}'), 'needs "arguments"'),
    "both spellings": (b('{"name": "search", "arguments": {}, "parameters": {}}'), "both"),
    "arguments null": (b('{"name": "search", "arguments": null}'), "must be a JSON object"),
    "arguments a list": (b('{"name": "search", "arguments": ["x"]}'), "must be a JSON object"),
    "arguments a number": (b('{"name": "search", "arguments": 3}'), "must be a JSON object"),
    "arguments an empty text": (b('{"name": "search", "arguments": ""}'), "is a string that is not valid JSON"),
    "arguments encoded twice": (b(json.dumps({"name": "s", "arguments": json.dumps(json.dumps(X))})), "must be a JSON"),
    "flat arguments": (b('{"name": "search", "query": "x"}'), 'needs "arguments"'),
    "name not text": (b('{"name": 3, "arguments": {}}'), 'needs a "name"'),
    "name blank": (b('{"name": " ", "arguments": {}}'), 'needs a "name"'),
    "openai's nesting": (b('{"type": "function", "function": {"name": "s", "arguments": {}}}'), 'needs a "name"'),
    "never closed": ("<tool_call>" + c(X), "not closed"),
    "closed as another tag": ("<tool_call>" + c(X) + "</tool_response>", "not closed"),
    "never closed, then the stop marker": ("<tool_call>" + c(X) + "<answer>", "not closed"),
    "only the closing tag": (c(X, "a") + "</tool_call>", "marks a call|plain JSON|without its opening"),
    "a good and a bad one": (b(f"[{c(X)}, 3]"), "must be a JSON object"),
    "deep arguments": (b(c({"x": json.loads("[" * 80 + "]" * 80)})), "nested too deeply"),
    "deep objects": (b('{"name": "a", "arguments": ' + '{"x":' * 200 + "1" + "}" * 201), "nested too deeply"),
}


@pytest.mark.parametrize("name", READABLE)
def test_what_models_write_and_can_be_read(name):
    text, arguments = READABLE[name]
    found = calls(text)
    assert [(call.arguments, call.error) for call in found] == [(item, None) for item in arguments]
    json.dumps([call.arguments for call in found], ensure_ascii=False).encode()


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_models_write_and_cannot_be_read(name):
    text, reason = UNREADABLE[name]
    turn = parse_turn(text)
    assert turn.calls and all(call.arguments is None for call in turn.calls)
    assert re.search(reason, turn.calls[0].error)
    assert turn.stopped or turn.answer is None


@pytest.mark.parametrize("text", [text for text, _ in READABLE.values()], ids=list(READABLE))
def test_the_prompts_opened_thought_makes_drafts_of_all_before_it_closes(text):
    turn = parse_turn(f"draft {b(c(X))} </think>{text}", prefilled_think=True)
    alone = parse_turn(text)
    if "</think>" not in text.replace(b(c({"query": "<think>"})), ""):
        assert [call.arguments for call in turn.calls] == [call.arguments for call in alone.calls]
        assert "draft" in turn.thought and turn.faults == alone.faults


def test_a_call_whose_tags_were_dropped_in_decoding_is_still_seen():
    """Case P14a, where someone else decoded; what our loop decodes keeps the tags (tests/rollout)."""
    bare = re.sub("</?tool_call>", "", CASES["P14a"]["text"])
    (call,) = calls(bare)
    assert call.name == "search" and call.error


def test_every_case_is_named_in_this_file():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in CASES if not re.search(rf"\b{name}\b", source)] == []


def test_a_deep_call_can_be_walked_through_later():
    (call,) = calls(b(c({"x": json.loads("[" * 60 + "]" * 60)})))
    assert call.error is None and call.key() and json.dumps(replace(Trajectory("q", (parse_turn(""),))).to_dict())


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
    assert bool(calls(visible)) or ("<tool_call>" not in visible and "</tool_call>" not in visible)


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
