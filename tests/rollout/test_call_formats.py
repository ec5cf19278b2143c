"""verl's parsers under our rules: what they read, and what they would have dropped or made up."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser

from rltr_verl.errors import ConfigError
from rltr_verl.parsing import MAX_UNREADABLE
from rltr_verl.rollout.call_formats import FAMILIES, read_calls_with, stop_token_ids
from rltr_verl.rollout.template import ChatTemplate
from tests.test_parsing import CASES

PROPERTIES = {
    "query": {"type": "string"},
    "k": {"type": "integer"},
    "deep": {"type": "boolean"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("search", "lookup")
]


def xml(inside, name="search"):
    return f"<function={name}>\n{inside}</function>\n"


def parameter(key, value):
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def invoke(inside, name="search", mark=""):
    return f'<{mark}invoke name="{name}">\n{inside}</{mark}invoke>\n'


def qwen(*calls):
    return "<tool_call>\n" + "".join(calls) + "</tool_call>"


def seed(*calls):
    return "<seed:tool_call>\n" + "".join(calls) + "</seed:tool_call>"


def minimax(*calls):
    return "<minimax:tool_call>\n" + "".join(calls) + "</minimax:tool_call>"


def glm(*pairs, name="search"):
    inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs)
    return f"<tool_call>{name}\n{inside}</tool_call>"


def dsml(*calls):
    return "<｜DSML｜tool_calls>\n" + "".join(calls) + "</｜DSML｜tool_calls>"


def dsml_call(*parameters, name="search"):
    inside = "".join(
        f'<｜DSML｜parameter name="{key}" string="{text}">{value}</｜DSML｜parameter>\n'
        for key, text, value in parameters
    )
    return invoke(inside, name, "｜DSML｜")


def kimi(*calls):
    inside = "".join(
        f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for name, arguments in calls
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def harmony(arguments, name="search"):
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    )


QUOTE = '<|"|>'
MINI = '<parameter name="query">x</parameter>\n'

READABLE = [
    ("qwen3_coder", qwen(xml(parameter("query", "x"))), [{"query": "x"}]),
    ("qwen3_coder", qwen(xml(parameter("query", "a < b\n  c"))), [{"query": "a < b\n  c"}]),
    ("qwen3_coder", qwen(xml(parameter("query", "2662") + parameter("k", "3"))), [{"query": "2662", "k": 3}]),
    ("qwen3_coder", qwen(xml(parameter("deep", "True") + parameter("limit", "7"))), [{"deep": True, "limit": 7}]),
    ("qwen3_coder", qwen(xml(parameter("deep", "perhaps"))), [{"deep": "perhaps"}]),
    ("qwen3_coder", qwen(xml(parameter("limit", "null"))), [{"limit": None}]),
    ("qwen3_coder", qwen(xml(parameter("query", "x")), xml(parameter("query", "y"))), [{"query": "x"}, {"query": "y"}]),
    ("qwen3_coder", qwen(xml("", "now")) + "<|im_end|>", [{}]),
    ("qwen3_coder", f"<think>{qwen(xml(parameter('query', 'no')))}</think>" + qwen(xml("", "now")), [{}]),
    ("glm", glm(("query", "x")), [{"query": "x"}]),
    ("glm", glm(("query", "2662"), ("k", "3")) + "<|observation|>", [{"query": "2662", "k": 3}]),
    ("glm", glm(("filter", '{"a": [1]}')), [{"filter": {"a": [1]}}]),
    ("glm", "<tool_call>now</tool_call>", [{}]),
    ("glm", "<think>a</think>" + glm(("query", "x")) + glm(("query", "y")), [{"query": "x"}, {"query": "y"}]),
    ("seed", seed(xml("<parameter=query>x</parameter>")), [{"query": "x"}]),
    ("seed", seed(xml(parameter("query", "x")), xml(parameter("query", "y"))), [{"query": "x"}, {"query": "y"}]),
    ("minimax", minimax(invoke(MINI)), [{"query": "x"}]),
    ("minimax", minimax(invoke(MINI), invoke(MINI.replace("x", "1984"))), [{"query": "x"}, {"query": "1984"}]),
    ("kimi", kimi(("functions.search:0", '{"query": "x"}')) + "<|im_end|>", [{"query": "x"}]),
    ("kimi", kimi(("search", '{"query": "x"}'), ("functions.lookup:1", "{}")), [{"query": "x"}, {}]),
    ("deepseek_v4", dsml(dsml_call(("query", "true", "x"), ("k", "false", "5"))), [{"query": "x", "k": 5}]),
    (
        "deepseek_v4",
        dsml(dsml_call(("query", "true", "42")), dsml_call()) + "<｜end▁of▁sentence｜>",
        [{"query": "42"}, {}],
    ),
    ("deepseek_v4", "a</think>\n" + dsml(dsml_call(("query", "true", "x"))), [{"query": "x"}]),
    (
        "gemma4",
        f"<|tool_call>call:search{{query:{QUOTE}x, y: z{QUOTE},k:3}}<tool_call|>",
        [{"query": "x, y: z", "k": 3}],
    ),
    (
        "gemma4",
        f"<|tool_call>call:search{{query:{QUOTE}if x:\n  {{}}, 1\n{QUOTE},note:{QUOTE}a: b{QUOTE}}}<tool_call|>",
        [{"query": "if x:\n  {}, 1\n", "note": "a: b"}],
    ),
    ("gemma4", "<|tool_call>call:now{}<tool_call|>", [{}]),
    ("gemma4", "<|channel>thought\nhm<channel|><|tool_call>call:search{deep:true}<tool_call|>", [{"deep": True}]),
    ("gpt-oss", harmony('{"query": "x"}'), [{"query": "x"}]),
    ("gpt-oss", "<|channel|>analysis<|message|>hm<|end|>" + harmony('{"query": "x"}'), [{"query": "x"}]),
    ("gpt-oss", harmony('{"query": "x"}').removeprefix("<|start|>assistant"), [{"query": "x"}]),
    ("gpt-oss", "<|channel|>commentary<|message|>I search.<|end|>" + harmony("{}"), [{}]),
    ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>', [{"query": "x"}]),
]

UNREADABLE = [
    ("qwen3_coder", qwen("<function=search><parameter=query>x</function>"), "not as 'qwen3_coder'"),
    ("qwen3_coder", qwen("<function=search>query: x</function>"), "not as 'qwen3_coder'"),
    ("qwen3_coder", qwen("<function=search"), "not as 'qwen3_coder'"),
    ("qwen3_coder", qwen(), "not as 'qwen3_coder'"),
    ("qwen3_coder", qwen(xml(parameter("query", "x") * 2)), "given twice"),
    ("qwen3_coder", "<tool_call><function=search><parameter=query>x", "not closed"),
    ("qwen3_coder", xml(parameter("query", "x")), "not as 'qwen3_coder'"),
    ("qwen3_coder", '<tool_call>{"name": "search", "arguments": {}}</tool_call>', "written as Hermes writes"),
    ("qwen3_coder", glm(("query", "x")), "written as GLM writes"),
    ("glm", "<tool_call>search\n<arg_key>query</arg_key>\n</tool_call>", "not as 'glm'"),
    ("glm", "<tool_call>search\n<arg_key>query</arg_key><arg_value>x</tool_call>", "not as 'glm'"),
    ("glm", "<tool_call>search for x</tool_call>", "not as 'glm'"),
    ("glm", glm(("query", "x"), ("query", "y")), "given twice"),
    ("glm", qwen(xml("")), "written as Qwen3-Coder writes"),
    ("seed", seed("<function=search><parameter=query>x</function>"), "not as 'seed'|Qwen3"),
    ("seed", seed("nothing"), "not as 'seed'"),
    ("seed", qwen(xml("")), "written as Hermes writes"),
    ("minimax", minimax('<invoke name="search">query: x</invoke>'), "not as 'minimax'|XML"),
    ("minimax", minimax("<invoke>x</invoke>"), "not as 'minimax'|XML"),
    ("kimi", kimi(("functions.search:0", '{"query": ')), "not valid JSON"),
    ("kimi", kimi(("functions.search:0", "[1]")), "must be a JSON object"),
    ("kimi", kimi(("functions.search:0", '{"query": "x", "query": "y"}')), "same key twice"),
    ("kimi", kimi(("functions.search:0", "{}"), ("functions.search:1", "{")), "not valid JSON"),
    ("kimi", "<|tool_call_begin|>search<|tool_call_argument_begin|>{}<|tool_call_end|>", "not as 'kimi'"),
    ("deepseek_v4", dsml('<｜DSML｜invoke name="search">'), "not as 'deepseek_v4'"),
    ("deepseek_v4", dsml(dsml_call(("query", "maybe", "x"))), "not as 'deepseek_v4'"),
    ("deepseek_v4", dsml_call(("query", "true", "x")), "not as 'deepseek_v4'"),
    ("gemma4", "<|tool_call>call:search{k:[1,2]}<tool_call|>", "not as 'gemma4'"),
    ("gemma4", '<|tool_call>call:search{query:"x"}<tool_call|>', "not as 'gemma4'"),
    ("gemma4", "<|tool_call>call:search{k:NaN}<tool_call|>", "NaN"),
    ("gpt-oss", harmony('{"query": '), "not valid JSON"),
    ("gpt-oss", harmony("{}").replace("<|constrain|>json", "json"), "not as 'gpt-oss'"),
    ("gpt-oss", harmony("{}").removesuffix("<|call|>"), "not closed"),
]


@pytest.fixture
def tagged_tokenizer(tiny_folder):
    tagged = AutoTokenizer.from_pretrained(tiny_folder)
    tagged.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    return tagged


@pytest.fixture(scope="module")
def readers(tokenizer):
    return {name: read_calls_with(name, tokenizer, schemas=SCHEMAS) for name in (*FAMILIES, "hermes")}


@pytest.mark.parametrize(("name", "text", "arguments"), READABLE)
def test_calls_of_other_families(readers, name, text, arguments):
    turn = readers[name](text)
    assert [(call.arguments, call.error) for call in turn.calls] == [(item, None) for item in arguments]
    assert turn.text == text and {call.name for call in turn.calls} <= {"search", "lookup", "now"}


@pytest.mark.parametrize(("name", "text", "reason"), UNREADABLE)
def test_what_verls_parser_would_drop_or_make_up_is_an_unreadable_call(readers, name, text, reason):
    (call,) = readers[name](text).calls
    assert call.arguments is None
    assert any(part in call.error for part in reason.split("|")), call.error


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt-oss"])
def test_a_call_in_a_thought_is_thought(readers, name):
    text = next(text for family, text, _ in READABLE if family == name).removesuffix("<|im_end|>")
    turn = readers[name](f"<think>{text}</think>\n<answer>")
    assert turn.calls == () and turn.stopped and turn.faults == ()


MARKS = sorted({part for _, text, _ in READABLE for part in re.findall(r"<[^<>]*>|[^<>]+", text)})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", FAMILIES)
def test_any_text_gives_a_turn_in_which_no_opened_block_is_lost(readers, name, data):
    text = "".join(
        data.draw(st.lists(st.sampled_from([*MARKS, FAMILIES[name].opening]) | st.text(max_size=4), max_size=20))
    )
    turn = readers[name](text)
    assert turn.text == text
    assert all((call.arguments is None) == (call.error is not None) for call in turn.calls)
    opened = FAMILIES[name].opening in text and not re.search("think>|answer>|channel", text)
    assert turn.calls or turn.faults or not opened


@pytest.mark.parametrize("name", FAMILIES)
def test_stop_marker_and_faults_are_those_of_every_turn(readers, name):
    assert readers[name]("<answer>").stopped and readers[name]("").faults == ("empty_turn",)
    assert readers[name]("<tool_response>42</tool_response>").faults == ("forged_tool_response",)
    assert readers[name]("<think>a").faults[0] == "unbalanced_think"


def test_gpt_oss_marks_of_the_final_channel_are_no_fault(readers):
    turn = readers["gpt-oss"](
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|><answer>"
    )
    assert (turn.thought, turn.stopped, turn.answer, turn.faults) == ("hm", True, "", ())
    assert readers["gpt-oss"]("<|start|>user<|message|>hi<|end|>x").faults == ("forged_role",)


def test_every_parser_of_verl_has_a_grammar_here():
    assert {*FAMILIES, "hermes"} >= {name for name, cls in ToolParser._registry.items() if "verl." in cls.__module__}


def test_an_unknown_format_is_one_clear_error_that_lists_verls_names(tokenizer):
    with pytest.raises(ConfigError, match=r"rltr.rollout.format: verl has no tool parser 'qwen3'.*glm.*hermes.*kimi"):
        read_calls_with("qwen3", tokenizer)


def test_a_parser_without_a_grammar_is_refused(tokenizer, monkeypatch):
    monkeypatch.setitem(ToolParser._registry, "mine", ToolParser)
    with pytest.raises(ConfigError, match="the grammar of verl's tool parser 'mine' is not known"):
        read_calls_with("mine", tokenizer)


async def test_reading_works_inside_a_running_loop(readers):
    texts = [(name, text, expected) for name, text, expected in READABLE if name == "glm"]
    loop = asyncio.get_running_loop()
    read = await asyncio.gather(*(loop.run_in_executor(None, readers[name], text) for name, text, _ in texts))
    assert [[call.arguments for call in turn.calls] for turn in read] == [expected for _, _, expected in texts]
    assert readers["glm"](texts[0][1]).calls[0].arguments == texts[0][2][0]


@pytest.mark.parametrize("name", FAMILIES)
def test_time_is_linear_in_the_length(readers, name):
    """20,000 openings, broken calls or arguments take well under a second here; a pass per mark takes minutes."""
    text = next(text for family, text, _ in READABLE if family == name)
    middle = FAMILIES[name].opening
    pieces = [
        middle,
        middle + "x",
        text[: len(text) // 2],
        text[len(text) // 2 :],
        "<arg_key>",
        "<parameter=a>",
        "k:1,",
    ]
    start = time.process_time()
    for piece in pieces:
        for opening in ("", middle, text[: len(text) // 2]):
            turn = readers[name](opening + piece * 20_000)
            assert sum(call.error is not None for call in turn.calls) <= MAX_UNREADABLE + 1
    assert time.process_time() - start < 20.0


def test_a_family_mismatch_is_warned_about_once(tokenizer, caplog):
    """Case P16a."""
    read = read_calls_with("hermes", tokenizer)
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            (call,) = read(CASES["P16a"]["text"]).calls
            assert call.error and call.name == "search"
    (message,) = [text for text in caplog.messages if "tool format mismatch" in text]
    assert "set rltr.rollout.format=qwen3_coder" in message


def test_the_loop_decodes_tags_that_are_special_tokens(tagged_tokenizer):
    """Case P14a: ``<tool_call>`` among the tokenizer's special tokens."""
    tokenizer = tagged_tokenizer
    ids = tokenizer.encode(CASES["P14a"]["text"], add_special_tokens=False)
    assert "<tool_call>" not in tokenizer.decode(ids, skip_special_tokens=True)
    text = ChatTemplate(tokenizer, []).decode(ids)
    (call,) = read_calls_with("hermes", tokenizer)(text).calls
    assert call.error is None and json.loads(call.raw)["arguments"] == call.arguments == {"query": "x"}


def test_stop_tokens_of_a_family(tokenizer):
    assert stop_token_ids("hermes", tokenizer) == stop_token_ids("qwen3_coder", tokenizer) == []
    assert stop_token_ids("kimi", tokenizer) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
