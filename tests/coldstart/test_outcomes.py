"""What an attempt came to: nothing, a refusal, the same once more, or a trajectory."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from rltr_verl.coldstart.outcomes import classify, declines, turns_digest
from rltr_verl.coldstart.records import Outcome
from rltr_verl.coldstart.sampling import SampleOptions, sample
from rltr_verl.coldstart.store import Folder
from rltr_verl.parsing import parse_turn
from rltr_verl.trajectory import Observation, Trajectory
from tests.coldstart.sampling_kit import STOP, Kit, call, lines_of, towns, write_queries
from tests.fakes.openai_server import FakeServer, Reply


def trajectory(*texts: str, thinking: bool = False) -> Trajectory:
    return Trajectory("q", tuple(parse_turn(text, thinking) for text in texts))


REFUSALS = [
    "I'm sorry, I can't help with that.",
    "I\u2019m sorry, but I can\u2019t assist with that request.",
    "Sorry. I cannot help you with this.",
    "I apologize, but I am not able to provide that.",
    "I cannot comply with this request.<answer>",
    "As an AI language model, I don't have access to real-time data.",
    "As an AI, I cannot browse the internet.",
    "I must respectfully decline.",
    "Unfortunately, I'm unable to answer this.",
    "That would violate my guidelines.",
    "<think>It asks for the weather; easy.</think>I won't help with this.",
    "Step by step?</think>I can't do that.",
    "抱歉，我无法回答这个问题。",
    "对不起，我不能提供帮助。",
    "很遗憾，这个请求我没办法满足。<answer>",
    "作为一个人工智能语言模型，我无法访问实时数据。",
    "作為AI，我不能協助您。",
    "我無法協助您完成這個請求。",
]
FINE = [
    STOP,
    "ok plan",
    f"Nothing has to be looked up.{STOP}",
    f"As an AI planner I do not need a tool for a greeting.{STOP}",
    f"I cannot see anything that is missing.{STOP}",
    f"<think>I'm sorry, I can't help with that.</think>{STOP}",
    f"<think>I can't help it, the user wants 2+2.</think>Simple enough.{STOP}",
    f"I can't help but smile. Hello!{STOP}",
    f"不需要任何工具。{STOP}",
    f"这个问题不能用工具查，直接结束。{STOP}",
    f"我不会再查，信息已足够。{STOP}",
    "The report is long. " * 40 + "It quotes: I'm sorry, I can't help with that.",
    call("how to say: I'm sorry, I can't help with that"),
    f"I'm sorry, I can't answer from memory, so I search.\n{call('x')}",
    "I cannot help. <tool_call>{broken</tool_call>",
]
EMPTY = ["", "  \n\t", "\u200b", "<think></think>", "<think>\n\n</think>\n\n", "<think>I wonder", "all thought</think>"]


@pytest.mark.parametrize("text", REFUSALS)
def test_a_text_without_calls_that_declines_is_a_refusal(text):
    outcome, reason = classify(trajectory(text))
    assert outcome is Outcome.REFUSAL and reason is not None and reason.startswith("declines: ")


@pytest.mark.parametrize("text", FINE)
def test_a_planner_that_stops_or_calls_is_no_refusal(text):
    assert classify(trajectory(text)) == (Outcome.OK, None)


@pytest.mark.parametrize("text", EMPTY)
def test_what_holds_no_text_is_empty(text):
    assert classify(trajectory(text))[0] is Outcome.EMPTY


def test_no_turn_at_all_is_empty_and_an_empty_turn_behind_calls_is_not():
    assert classify(trajectory())[0] is Outcome.EMPTY
    assert classify(trajectory(call("x"), ""))[0] is Outcome.OK


def test_a_thought_that_the_prompt_has_opened_counts_for_nothing():
    assert classify(trajectory("I'm sorry, I can't help.", thinking=True))[0] is Outcome.EMPTY
    assert classify(trajectory(f"I'm sorry, I can't help.</think>{STOP}", thinking=True))[0] is Outcome.OK


def test_declines_reads_any_apostrophe_and_case():
    assert all(declines(f"I CAN{mark}T HELP with it") for mark in "'\u2019\u2018`\u00b4\u02bc")


def call_of(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call>'


def test_the_same_turns_have_one_digest():
    one = trajectory(f"Look.\n{call_of(json.dumps({'a': 'x  y', 'b': 1}))}", STOP)
    same = trajectory(f"Look.  {call_of(json.dumps({'b': 1.0, 'a': 'x y'}))}\n", f" {STOP}")
    assert turns_digest("q", one) == turns_digest("q", same)
    seen = Trajectory(
        "q", tuple(type(turn)(**{**vars(turn), "observations": (Observation("x"),)}) for turn in one.turns)
    )
    assert turns_digest("q", seen) == turns_digest("q", one)


@pytest.mark.parametrize(
    "texts",
    [
        (f"Look.\n{call_of('{}')}", STOP),
        (f"Seek.\n{call_of(json.dumps({'a': 'x y', 'b': 1}))}", STOP),
        (f"<think>a</think>Look.\n{call_of(json.dumps({'a': 'x y', 'b': 1}))}", STOP),
        (f"Look.\n{call_of(json.dumps({'a': 'x y', 'b': '1'}))}", STOP),
        (f"Look.\n{call_of(json.dumps({'a': 'x y', 'b': 1}))}",),
    ],
)
def test_other_turns_have_another_digest(texts):
    one = trajectory(f"Look.\n{call_of(json.dumps({'a': 'x y', 'b': 1}))}", STOP)
    assert turns_digest("q", one) != turns_digest("q", trajectory(*texts))
    assert turns_digest("q", one) != turns_digest("r", one)


async def test_case_s09a_over_real_http(tmp_path):
    """Outputs "", a refusal, "ok plan" twice and null: one is kept, and no text "None" is written."""
    kit = Kit(tmp_path)
    outputs = ["", "I'm sorry, I can't help with that.", "ok plan", "ok plan", None]
    async with FakeServer([Reply(text) for text in outputs]) as server:
        settings = kit.settings(server.url, concurrency=1)
        queries = write_queries(tmp_path / "q.jsonl", *towns(1))
        options = SampleOptions(n=5)
        summary = await asyncio.to_thread(sample, tmp_path / "cs", queries, settings, str(kit.model), options)
    assert summary.outcomes == {Outcome.OK: 1, Outcome.EMPTY: 2, Outcome.REFUSAL: 1, Outcome.DUPLICATE: 1}
    lines = lines_of(tmp_path / "cs")
    assert Counter(line["outcome"] for line in lines) == {"empty": 2, "refusal": 1, "duplicate": 1, "ok": 1}
    assert "None" not in Folder(tmp_path / "cs").samples.read_text("utf-8")
    assert all(line["reason"] for line in lines if line["outcome"] != "ok")
