"""The verdict parser: every reply of the field's cases, and what judges write besides."""

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltr_verl import parse_verdict
from rltr_verl.judge.verdict import parse_grade, read_reply

FOLDER = Path(__file__).parents[1] / "cases"


def lines(name):
    return [json.loads(line) for line in (FOLDER / name).read_text("utf-8").splitlines()]


CASES = {case["id"]: case["input"] for case in lines("checker_client.jsonl")}
REPLIES = [(case["reply"], case["expect"]) for case in lines("judge_replies.jsonl") if "scale" not in case]
GRADES = [(case["reply"], case["scale"], case["expect"]) for case in lines("judge_replies.jsonl") if "scale" in case]
REASONS = re.compile("think|thought|<.?scratchpad>|<.?analysis>|<.?reasoning>|channel", re.IGNORECASE)
EXPECTED = {
    **{
        "C01a": 0,
        "C01b": 0,
        "C01c": 0,
        "C01d": 0,
        "C02a": None,
        "C02b": 0,
        "C04a": 1,
        "C04b": None,
        "C06a": 0,
        "C06b": 1,
    },
    **{"C06c": 0, "C07a": None, "C07b": None, "C07c": None, "C07d": None, "C07e": None, "C09a": None, "C11a": None},
    **{"C11b": None, "C12b": None, "C29a": 1, "C29b": 1, "C29c": 1, "C29d": 1, "C29e": 0},
}


def test_every_reply_of_the_cases_is_covered():
    replies = {name for name, case in CASES.items() if case["kind"] in ("judge_reply", "judge_result_text")}
    assert replies == set(EXPECTED)


@pytest.mark.parametrize(("name", "verdict"), EXPECTED.items())
def test_cases(name, verdict):
    assert parse_verdict(CASES[name]["content"]) is verdict


COMPLETE = [
    *(
        "1",
        "１",
        " **1** ",
        "1.0",
        "1分",
        "- 1",
        "[1]",
        "Score: 1/1",
        "score: yes",
        "score=1",
        "得分为1",
        "评分: 1 分",
        "最终评分：**1**",
    ),
    *(
        "Yes",
        "PASS",
        "true",
        "Complete",
        "COMPLETE.",
        "完整。",
        "是",
        "通过",
        "Verdict: pass",
        "Is complete: yes",
        "是否完整：是",
    ),
    *("The trajectory is complete.", "The plan is **complete**.", "This is a complete plan.", "这个计划是完整的。"),
    "All calls were made; nothing is missing, so it is complete.",
    "没有任何遗漏，调用完整",
    '```json\n{"complete": true}\n```',
    '{"verdict": "Complete"}',
    '{"score": "1"}',
    '{"reason": "x", "result": {"score": 1}}',
    '{"score": 1',
    "<think>score: 0</think>1",
    "<think>a</think><think>b</think>Score: 1",
    "Output 0 = missing, 1 = complete.\nVerdict: 1",
    "Verdict: 1\nResult: good plan",
    "Score: 1. The answer is 42.",
    "1\n\nThe plan covers everything.",
    "\\boxed{1}",
]
INCOMPLETE = [
    *(
        "0",
        "No.",
        "FAIL",
        "False",
        "否",
        "不是",
        "结论：不完整",
        "是否完整：否",
        "完整性：0",
        "判断为0",
        "调用不够完整",
        "未通过",
    ),
    *("Score: 0/1", "score: 0.0", "score: -0", "Rating: [[0]]", "Score: **0**", "verdict: fail", "is_complete=false"),
    *("This isn't complete", "The task was not completed.", "This is an incomplete plan", "Verdict: Not complete"),
    "The planner searched Arlen. It did not search Brona. Therefore the plan is incomplete.",
    "The plan is not complete: 1 search is missing",
    "Verdict: incomplete, because 1 search is missing",
    "The calculator's result is 1, as needed. The plan is incomplete.",
    "规划器通过搜索获取了信息，但调用不完整。",
    "Score: 0 because the Brona search is missing",
    "Score: 1\nOn reflection, final score: 0",
    '{"score": 1}\n\nFinal verdict: 0',
    "score is 1 </think> Score: 0",
    '```json\n{"reason": "score: 1", "score": 0}\n```\nDone.',
    "Reasoning about steps.\n\n0",
]
UNREADABLE = [
    *(
        "",
        "   ",
        "10",
        "0.5",
        "-1",
        "2",
        "100%",
        "Score: 10",
        "Score: 1/10",
        "Score: 1 out of 5",
        "score: 100%",
        "score: 1.5",
    ),
    *(
        "{}",
        "[]",
        '{"score": null}',
        '{"score": true, "verdict": 0}',
        '{"score": 0, "score": 1}',
        '{"reason": "complete"}',
    ),
    *(
        "Verdict: unsure",
        "almost complete",
        "可能完整",
        "无法判断是否完整",
        "The plan is not incomplete.",
        "Yes, but incomplete",
    ),
    *("the score should be 1", "I would give a score of 1", "Search completed successfully.", "0\n\n1"),
    "<think>the score is 1",
    "The first part is complete. The second part is incomplete.",
    "Unsure whether complete or incomplete",
    "It is hard to say whether the plan is complete.",
    "The plan is complete only if the city is Arlen",
    "not only complete but also efficient",
    "A complete answer needs two searches.",
    "完整的答案需要两次搜索",
    "There is no doubt the plan is complete.",
    "1. The planner searched.\n2. Then it computed.",
    "The planner passed the query to search.",
    "规划器通过搜索获取了信息。",
    "It's true that 1 call was made",
    '{"reason": "x", "score":',
]


@pytest.mark.parametrize("reply", COMPLETE)
def test_complete(reply):
    assert parse_verdict(reply) == 1


@pytest.mark.parametrize("reply", INCOMPLETE)
def test_incomplete(reply):
    assert parse_verdict(reply) == 0


@pytest.mark.parametrize("reply", UNREADABLE)
def test_no_verdict(reply):
    assert parse_verdict(reply) is None


@pytest.mark.parametrize("reply", [None, 1, True, b"1", ["1"], {"score": 1}])
def test_anything_but_text_is_no_verdict(reply):
    assert parse_verdict(reply) is None


@pytest.mark.parametrize(("reply", "verdict"), REPLIES)
def test_what_judges_write(reply, verdict):
    assert parse_verdict(reply) is verdict


@pytest.mark.parametrize(("reply", "verdict"), [pair for pair in REPLIES if not REASONS.search(pair[0])])
def test_reasoning_around_a_reply_changes_nothing(reply, verdict):
    assert parse_verdict(f'<think>The score: 1? No, score: 0. {{"score": 1}}</think>\n{reply}') is verdict
    assert parse_verdict(f"Score: 1, or 0?</think>{reply}") is verdict
    assert parse_verdict(f"<think>{reply}") is None


@pytest.mark.parametrize("name", ["C11a", "C11b"])
def test_grades_of_the_cases(name):
    assert parse_grade(CASES[name]["content"], CASES[name]["scale"]) == "B"


@pytest.mark.parametrize(("reply", "scale", "grade"), GRADES)
def test_grades(reply, scale, grade):
    assert parse_grade(reply, scale) == grade


@pytest.mark.parametrize("reply", [None, 1, {"grade": "A"}])
def test_anything_but_text_is_no_grade(reply):
    assert parse_grade(reply, "A/B") is None and parse_grade("A", "") is None


@pytest.mark.parametrize(
    ("content", "reasoning", "expected"),
    [
        ('{"reason": "both\\n searched", "score": 1}', "thinking", (1, "both searched")),
        ('Well.\n```json\n{"score": 0, "理由": "缺少一次查询"}\n```', None, (0, "缺少一次查询")),
        ("The second city is missing.\nScore: 0", None, (0, "The second city is missing. Score: 0")),
        ("<think>long</think>Score: 1", None, (1, "Score: 1")),
        ("<think>so the score is 1", None, (None, None)),
        (None, "... so the score is 1", (None, "... so the score is 1")),
        ("", "Score: 1", (None, "Score: 1")),
        (None, None, (None, None)),
        ([{"type": "text", "text": "1"}], {"score": 1}, (None, None)),
    ],
)
def test_a_reply_gives_verdict_and_reason(content, reasoning, expected):
    """Case C19a: reasoning gives words, never a verdict."""
    assert read_reply(content, reasoning) == expected


def test_a_reason_is_short():
    assert len(read_reply(json.dumps({"reason": "ab " * 5000, "score": 1}))[1]) <= 500
    assert len(read_reply("", "ab " * 5000)[1]) <= 500


PIECES = st.sampled_from(
    [
        "score",
        ":",
        "：",
        "1",
        "0",
        "[[",
        "]]",
        "{",
        "}",
        '"',
        "complete",
        "not ",
        "<think>",
        "</think>",
        "\n",
        " ",
        "完整",
        "不",
    ]
)


@given(st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join))
def test_never_raises(reply):
    assert parse_verdict(reply) in (0, 1, None)


@pytest.mark.parametrize(
    "piece",
    [
        "{",
        '{"a":',
        "not ",
        "score: ",
        "不",
        "<think>",
        " ",
        "[[",
        "*",
        "score" + " " * 20,
        "if complete ",
        "1",
        '"',
        "_",
        "不完整",
        "complete or ",
        "</think>",
        "'a': '",
        "(0 or 1)",
        "<score>",
        "[[1]] ",
        '{"a": {',
        "score is 1? ",
        "wait score: 1 ",
        "score:\n1. a\n",
        "score: 1. a ",
        "complete: ",
        "complete: 1\n",
        "\n\n",
        "\\",
    ],
)
def test_work_is_bounded_for_a_megabyte(piece):
    reply = piece * (1_000_000 // len(piece))
    start = time.process_time()
    read_reply(reply, reply)
    parse_grade(reply, "A/B/C")
    assert time.process_time() - start < 3.0  # seconds of CPU; quadratic work takes minutes
