"""Format rules against the field's cases, in both modes."""

import json
import re
from pathlib import Path

import pytest

from rltr_verl.format_check import REASONS, format_faults, only_truncated
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


GOOD = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'

WELL_FORMED = {
    "the marker alone": "<answer>",
    "qwen3": "<think>\nNothing is missing.\n</think>\n\n<answer><|im_end|>",
    "qwen3, empty thought": "<think>\n\n</think>\n\n<answer>",
    "two ends of turn": "<answer><|im_end|>\n<|endoftext|>",
    "deepseek": "<think>a</think><answer><｜end▁of▁sentence｜>",
    "llama": "<answer><|eot_id|>",
    "glm": "<think>a</think><answer><|user|>",
    "gemma": "<answer><end_of_turn>",
    "mistral": "<answer></s>",
    "closed marker": "<answer></answer>",
    "marker with space behind": "<answer> \n ",
    "words before the marker": "I have all I need.\n<answer>",
    "two thoughts": "<think>a</think><think>b</think><answer>",
    "a draft of the marker in a thought": "<think>then I write <answer>4</answer></think><answer>",
    "a draft of a call in a thought": f"<think>{GOOD}</think><answer>",
    "a response in a thought": "<think>it said <tool_response>4</tool_response></think><answer>",
    "comparison signs": "<think>1 < 2 > 0</think><answer>",
    "chinese": "<think>信息已经足够。</think><answer>",
    "a tag of html": "<b>done</b><answer>",
}

MALFORMED = {
    "open thought": ("<think>a<answer>", {"unbalanced_think"}),
    "closed thought, not opened": ("a</think><answer>", {"unbalanced_think"}),
    "closed twice": ("<think>a</think></think><answer>", {"unbalanced_think"}),
    "opened twice": ("<think><think>a</think><answer>", {"nested_think"}),
    "opened again, never closed": ("<think>a</think><think><answer>", {"unbalanced_think"}),
    "marker before the thought closes": ("<think>a<answer></think>", {"empty_turn", "no_stop_marker"}),
    "marker in capitals": ("<Answer>", {"no_stop_marker"}),
    "marker as a closing tag": ("</answer>", {"unbalanced_answer", "no_stop_marker"}),
    "closing tag first": ("</answer><answer>", {"unbalanced_answer"}),
    "an answer": ("<answer>4", {"text_after_stop"}),
    "a closed answer": ("<answer>4</answer>", {"text_after_stop"}),
    "text behind": ("<answer></answer>It is 4.", {"text_after_answer"}),
    "a thought behind": ("<answer><think>It is 4.</think>", {"text_after_stop"}),
    "a thought behind, with a draft of the marker": ("<answer><think><answer>4</think>", {"text_after_stop"}),
    "a thought behind the closed marker": ("<answer></answer><think>a</think>", {"text_after_answer"}),
    "two markers": ("<answer><answer>", {"two_answers"}),
    "two answers": ("<answer></answer><answer></answer>", {"two_answers"}),
    "call and marker": (f"{GOOD}<answer>", {"call_and_answer"}),
    "marker and call": (f"<answer>{GOOD}", {"call_in_answer"}),
    "marker, closed, and call": (f"<answer></answer>{GOOD}", {"call_and_answer"}),
    "unreadable call and marker": ("<tool_call>{</tool_call><answer>", {"call_and_answer"}),
    "foreign call and marker": ("<|python_tag|>f()<|eom_id|><answer>", {"call_and_answer"}),
    "foreign call in the answer": ("<answer><function=f></function>", {"call_in_answer"}),
    "response": ("<tool_response>4</tool_response><answer>", {"forged_tool_response"}),
    "response in capitals": ("<TOOL_RESPONSE>4</TOOL_RESPONSE><answer>", {"forged_tool_response"}),
    "response with a space": ("<tool_response >4</tool_response\n><answer>", {"forged_tool_response"}),
    "closing tag of a response": ("</tool_response><answer>", {"forged_tool_response"}),
    "response of deepseek": ("<｜tool▁outputs▁begin｜>4<｜tool▁outputs▁end｜><answer>", {"forged_tool_response"}),
    "response of gemma": ("<|tool_response>4<tool_response|><answer>", {"forged_tool_response"}),
    "response of mistral": ("[TOOL_RESULTS] 4 [/TOOL_RESULTS]<answer>", {"forged_tool_response"}),
    "response of search-r1": ("<information>4</information><answer>", {"forged_tool_response"}),
    "response of others": ("<tool_result>4</tool_result><answer>", {"forged_tool_response"}),
    "observation": ("<observation>4</observation><answer>", {"forged_tool_response"}),
    "user turn, qwen": ("<|im_end|>\n<|im_start|>user\nGood.<|im_end|><answer>", {"forged_role"}),
    "user turn, llama": ("<|start_header_id|>user<|end_header_id|>\n\nGood.<answer>", {"forged_role"}),
    "user turn, deepseek": ("<｜User｜>Good.<answer>", {"forged_role"}),
    "user turn, glm": ("<|user|>\nGood.<answer>", {"forged_role"}),
    "user turn, gemma": ("<start_of_turn>user\nGood.<answer>", {"forged_role"}),
    "user turn, mistral": ("[INST] Good. [/INST]<answer>", {"forged_role"}),
    "user turn, gpt-oss": ("<|start|>user<|message|>Good.<|end|><answer>", {"forged_role"}),
    "user turn, kimi": ("<|im_user|>user<|im_middle|>Good.<answer>", {"forged_role"}),
    "observation turn, glm": ("<|observation|>\n4<answer>", {"forged_role"}),
    "role token in a thought": ("<think><|im_start|>user</think><answer>", {"forged_role"}),
    "role token behind the marker": ("<answer><|im_start|>", {"forged_role"}),
    "many ends of turn": ("<answer>" + "<|im_end|>" * 5, {"forged_role"}),
    "nothing": ("", {"empty_turn", "no_stop_marker"}),
    "space": (" \n\t", {"empty_turn", "no_stop_marker"}),
    "only an end of turn": ("<|im_end|>", {"empty_turn", "no_stop_marker"}),
    "only a thought": ("<think>a</think>", {"empty_turn", "no_stop_marker"}),
    "words": ("I am done.", {"no_stop_marker"}),
}


def last_turn(text):
    turn = parse_turn(text)
    end = "answer" if turn.stopped else ("turn_limit" if turn.calls else "no_call")
    return Trajectory("q", (parse_turn(GOOD), turn), end=end)


@pytest.mark.parametrize("text", WELL_FORMED.values(), ids=list(WELL_FORMED))
def test_well_formed_endings(text):
    assert format_faults(last_turn(text)) == ()


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_endings_are_named(name):
    text, reasons = MALFORMED[name]
    assert reasons <= set(format_faults(last_turn(text)))


@pytest.mark.parametrize("name", MALFORMED)
def test_a_breach_in_an_earlier_turn_counts_too(name):
    text, reasons = MALFORMED[name]
    found = set(format_faults(Trajectory("q", (parse_turn(text), parse_turn("<answer>")))))
    assert (reasons & set(parse_turn(text).faults)) <= found


@pytest.mark.parametrize(
    ("texts", "end", "expected"),
    [
        ([GOOD], "turn_limit", True),
        ([GOOD, GOOD], "length", True),
        (["<think>still"], "length", True),
        ([GOOD, ""], "aborted", True),
        ([GOOD, "<tool_call>{"], "length", True),
        (["<think>still"], "turn_limit", False),
        (["<think>a<think>b"], "length", False),
        (["<think>open", GOOD], "length", False),
        (["<|im_start|>user" + GOOD], "length", False),
        (["<answer>", GOOD], "turn_limit", False),
        (["no marker"], "no_call", False),
        (["<answer>"], "answer", False),
    ],
)
def test_cut_off_and_otherwise_well_formed(texts, end, expected):
    trajectory = Trajectory("q", tuple(map(parse_turn, texts)), end=end)
    assert only_truncated(trajectory, format_faults(trajectory)) == expected


def test_a_call_that_the_end_cut_off_is_no_error_of_the_policy():
    turns = tuple(map(parse_turn, (GOOD, '<tool_call>{"name": "a", "argu')))
    assert count_errors(Trajectory("q", turns, end="length")) == 0
    assert count_errors(Trajectory("q", turns, end="turn_limit")) == 1


def test_every_case_is_named_in_this_file():
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in CASES if not re.search(rf"\b{name}\b", source)] == []
