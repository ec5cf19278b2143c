"""Calls in the styles of other families: seen, named, never run, never lost; prose is left alone."""

import logging
import time

import pytest

from rltr_verl.call_styles import FormatWatch, foreign_style
from rltr_verl.parsing import MAX_UNREADABLE, parse_turn

ARGUMENTS = '{"query": "x"}'
JSON = '{"name": "search", "arguments": {"query": "x"}}'
XML = "<function=search>\n<parameter=query>\nx\n</parameter>\n</function>"

FOREIGN = {
    "qwen3-coder": (f"<tool_call>\n{XML}\n</tool_call>", "qwen3_coder"),
    "qwen3-coder without a block": (XML, "qwen3_coder"),
    "qwen3-coder, cut": ("<tool_call>\n<function=search>\n<parameter=query>\nx", "qwen3_coder"),
    "glm": ("<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>x</arg_value>\n</tool_call>", "glm"),
    "glm without a block": ("search\n<arg_key>query</arg_key>\n<arg_value>x</arg_value>", "glm"),
    "seed": (f"<seed:tool_call>\n{XML}\n</seed:tool_call>", "seed"),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="search">\n<parameter name="query">x</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "minimax",
    ),
    "kimi": (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{ARGUMENTS}"
        "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        "kimi",
    ),
    "deepseek v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="query" string="true">x'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        "deepseek_v4",
    ),
    "deepseek v3.2": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="search"></｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "deepseek_v4",
    ),
    "deepseek v3": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{ARGUMENTS}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        None,
    ),
    "gemma 4": ('<|tool_call>call:search{query:<|"|>x<|"|>}<tool_call|>', "gemma4"),
    "gpt-oss": (
        f"<|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "gpt-oss",
    ),
    "gpt-oss, role in the prompt": (
        f"<|channel|>commentary to=functions.search <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "gpt-oss",
    ),
    "gpt-oss, recipient first": (
        f"<|start|>assistant to=functions.search<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        "gpt-oss",
    ),
    "llama 3.1": ('<|python_tag|>{"name": "search", "parameters": {"query": "x"}}<|eom_id|>', None),
    "llama 3.1, code": ('<|python_tag|>brave_search.call(query="x")<|eom_id|>', None),
    "llama 3.2, bare": ('{"name": "search", "parameters": {"query": "x"}}<|eot_id|>', None),
    "llama 3.2, with a type": ('{"type": "function", "name": "search", "parameters": {"query": "x"}}', None),
    "llama 3.2, python": ('[search(query="x"), now()]', None),
    "llama 4": ('<|python_start|>[search(query="x")]<|python_end|>', None),
    "llama 3, function tag": ('<function=search>{"query": "x"}</function>', "qwen3_coder"),
    "mistral": (f"[TOOL_CALLS] [{JSON}]</s>", None),
    "mistral, v13": (f"[TOOL_CALLS]search[ARGS]{ARGUMENTS}", None),
    "qwen 2": (f"✿FUNCTION✿: search\n✿ARGS✿: {ARGUMENTS}", None),
    "granite": (f"<|tool_call|>[{JSON}]", None),
    "phi 4": (f"<|tool_call|>[{JSON}]<|/tool_call|>", None),
    "command r": (f"<|START_ACTION|>[{JSON}]<|END_ACTION|>", None),
    "internlm": (f"<|action_start|><|plugin|>{JSON}<|action_end|>", None),
    "search-r1": ("<search> population of X </search>", None),
    "xml calls": (
        '<function_calls>\n<invoke name="search">\n<parameter name="query">x</parameter>\n</invoke>\n</function_calls>',
        None,
    ),
    "plural": (f"<tool_calls>[{JSON}]</tool_calls>", None),
    "function_call": (f"<function_call>{JSON}</function_call>", None),
    "functioncall": (f"<functioncall> {JSON}", None),
    "tool_code": ('<tool_code>\nprint(search(query="x"))\n</tool_code>', None),
    "tool_use": ("<tool_use><name>search</name><arguments>{}</arguments></tool_use>", None),
    "capitals": (f"<TOOL_CALL>{JSON}</TOOL_CALL>", None),
    "a space in the tag": (f"<tool_call >{JSON}</tool_call >", None),
    "an attribute in the tag": ('<tool_call name="search">{"query": "x"}</tool_call>', None),
    "react": (f"Thought: I search.\nAction: search\nAction Input: {ARGUMENTS}", None),
    "code fence": (f"```json\n{JSON}\n```", None),
    "behind words": (f"I call {JSON} now.", None),
    "openai's nesting": ('{"type": "function", "function": {"name": "search", "arguments": "{}"}}', None),
    "langchain": ('{"tool": "search", "tool_input": {"query": "x"}}', None),
    "langchain, structured chat": ('{"action": "search", "action_input": {"query": "x"}}', None),
    "arguments first": ('{"arguments": {"query": "x"}, "name": "search"}', None),
    "several in an object": ('{"tool_calls": [' + JSON + "]}", None),
    "with an id and a type": ('{"id": "1", "type": "function", "name": "search", "arguments": {}}', None),
    "gemma 3": ('```tool_code\nsearch(query="x")\n```', None),
    "escaped tags": (f"&lt;tool_call&gt;{JSON}&lt;/tool_call&gt;", None),
    "full-width tags": (f"＜tool_call＞{JSON}＜/tool_call＞", None),
    "square tags": (f"[TOOL_CALL]{JSON}[/TOOL_CALL]", None),
    "backslash in the tag": (f"<tool_call\\>{JSON}</tool_call\\>", None),
    "python's quotes, bare": ("{'name': 'search', 'arguments': {'query': 'x', 'all': True}}", None),
    "bare and broken": ('{"name": "search", "arguments": {"query": "x"}', None),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_call_is_an_unreadable_call_that_names_its_family(name):
    text, parser = FOREIGN[name]
    turn = parse_turn(text)
    assert turn.calls and all(call.arguments is None and call.error for call in turn.calls)
    style = foreign_style(turn.calls[0].error)
    assert style is not None and style.parser == parser
    assert turn.answer is None


@pytest.mark.parametrize("name", ["mistral", "square tags", "full-width tags", "escaped tags", "react"])
def test_the_content_of_a_foreign_call_is_no_second_call(name):
    text, _ = FOREIGN[name]
    assert [call.name for call in parse_turn(text).calls] == ["search"]
    assert len(parse_turn(f"{text}\n{text}").calls) == 2


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_call_in_a_thought_is_thought(name):
    text, _ = FOREIGN[name]
    assert parse_turn(f"<think>{text}</think>\n<answer>").calls == ()


@pytest.mark.parametrize("name", [name for name in FOREIGN if "cut" not in name])
def test_a_good_call_behind_a_foreign_one_is_read(name):
    text, _ = FOREIGN[name]
    good = f"\n<tool_call>{JSON}</tool_call>"
    assert [call.arguments for call in parse_turn(text + good).calls if not call.error] == [{"query": "x"}]


@pytest.mark.parametrize("behind", [f"<tool_call>{JSON}</tool_call>", "<answer>"])
def test_a_call_quoted_beside_a_call_or_the_marker_is_prose(behind):
    assert not any(call.error for call in parse_turn(f"I wrote {JSON}.\n{behind}").calls)
    assert any(call.error for call in parse_turn(f"{JSON}\n{behind}").calls)


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 4.",
        "Use {braces} and [brackets] and a[0] and f(x=1).",
        '{"name": "Arlen", "population": 41}',
        '{"arguments": "for and against"}',
        '[{"name": "Arlen"}]',
        "The function search(query) is called by invoke.",
        "<b>bold</b> <a href='x'>link</a> <function> <search/> a<b a>b",
        "Action: none was needed.",
        "An action plan.\nAction: search the shelf\nResult: nothing",
        "1 < 2 | 3 > 2 <| not a token |>",
        "SELECT * FROM t WHERE a <> b",
        "#include <search.h>",
        "[1, 2, 3] and [see note]",
        '{"action": "rest"}',
        '{"arguments": ["for", "against"]}',
        "a &lt; b &amp; c, 《书》 〈注〉",
        "```python\nprint(1)\n```",
        "我需要更多信息。",
    ],
)
def test_prose_is_no_call(text):
    turn = parse_turn(text)
    assert turn.calls == () and turn.faults == () and turn.answer == text


@pytest.mark.parametrize(
    "piece",
    [
        *(
            "<function=",
            "<search>",
            "<search></search>",
            "<|tool_call>",
            "<|tool_call_begin|>",
            "<｜DSML｜invoke",
            "<invoke ",
        ),
        *(
            "<|channel|>",
            "<|channel|> to=",
            "<|start|>assistant",
            "<arg_key>",
            "<tool_call >",
            "[TOOL_CALLS]",
            "✿FUNCTION✿",
        ),
        *(
            '{"name": "a", "arguments": ',
            '{"type": "',
            "[f(",
            "Action: x\nAction Input: ",
            "Action:",
            "[",
            "{",
            "<|im_end|>",
        ),
        *(
            "<|user|>",
            "[INST]",
            "<tool_result>",
            "<|python_tag|>",
            "<tool_calls><think></think>",
            '{"name" : "a"',
            " " * 9,
        ),
    ],
)
@pytest.mark.parametrize("opening", ["", "<tool_call>"])
def test_time_is_linear_in_the_length(opening, piece):
    """20,000 marks in a megabyte take some 0.1 s here; a pass per mark takes minutes."""
    text = opening + piece * max(20_000, 1_000_000 // len(piece))
    start = time.process_time()
    turn = parse_turn(text)
    assert time.process_time() - start < 5.0
    assert sum(call.error is not None for call in turn.calls) <= 2 * MAX_UNREADABLE + 1


def test_a_run_of_foreign_calls_is_one_warning_that_names_the_format(caplog):
    """Case P16a."""
    text, _ = FOREIGN["qwen3-coder"]
    watch = FormatWatch("hermes")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            watch.see(parse_turn(text))
        assert caplog.messages == []
        for _ in range(5):
            watch.see(parse_turn(text))
    (message,) = caplog.messages
    assert "tool format mismatch" in message and "set rltr.rollout.format=qwen3_coder" in message


def test_a_family_without_a_parser_is_said_to_have_none(caplog):
    watch = FormatWatch("hermes")
    for _ in range(3):
        watch.see(parse_turn(FOREIGN["llama 3.1"][0]))
    (message,) = caplog.messages
    assert "as Llama writes them" in message and "verl has no parser for it" in message


def test_a_few_foreign_calls_among_good_ones_are_no_mismatch(caplog):
    watch = FormatWatch("hermes")
    for _ in range(10):
        watch.see(parse_turn(f"<tool_call>{JSON}</tool_call>"))
        watch.see(parse_turn("<tool_call>{</tool_call>"))
    for _ in range(5):
        watch.see(parse_turn(FOREIGN["glm"][0]))
    assert caplog.messages == []
