"""Answers: taken from the sample, from the row, or written by a teacher over real HTTP; resumed, bounded, counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rltr_verl.coldstart.answer_writer import AnswerWriter
from rltr_verl.coldstart.answers import Answers, checked, reference, require_source
from rltr_verl.coldstart.records import Sample
from rltr_verl.coldstart.store import Folder
from rltr_verl.config import TeacherSettings
from rltr_verl.errors import BudgetSpent, ConfigError, StageError
from tests.coldstart.export_kit import sample, two_turns
from tests.fakes.openai_server import FakeServer, Reply


def samples(n: int) -> list[Sample]:
    trajectory = two_turns("qwen3")
    return [sample(trajectory, number, f"q{number}") for number in range(n)]


def distinct(n: int) -> list[Sample]:
    """Samples whose prompts differ, so that each is asked for by itself."""
    return [sample(_asking(f"Query {number}?"), number, f"q{number}") for number in range(n)]


def _asking(query: str) -> Any:
    return type(two_turns("qwen3"))(**{**vars(two_turns("qwen3")), "query": query})


def teacher(url: str, **given: Any) -> TeacherSettings:
    return TeacherSettings(base_url=url, model="m", **{"retries": 0, "concurrency": 4, **given})


async def write(folder: Path, url: str, asked: Sequence[Sample], **given: Any) -> dict[str, Any]:
    writer = AnswerWriter(Folder(folder), teacher(url, **given))
    return await asyncio.to_thread(writer.write, asked)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n ", "empty"),
        ("[NO ANSWER]", "declined"),
        ("I cannot answer that from the results.", "declined"),
        ("I'm sorry, but there is nothing.", "declined"),
        ("抱歉，无法回答。", "declined"),
        ("Insufficient information.", "declined"),
        ("41</answer> more", "markup"),
        ("41 <answer>", "markup"),
        ('<tool_call>{"name": "search", "arguments": {}}</tool_call>', "markup"),
    ],
)
def test_what_is_no_answer_has_its_reason(text, reason):
    assert checked(text).text is None and checked(text).reason == reason


@pytest.mark.parametrize("text", ["It is 41.", "不能。", "Sorrel grows there.", "a < b, and 2 > 1", "**41** `x`"])
def test_an_answer_is_taken_as_it_is(text):
    assert checked(f" {text}\n").text == text


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("41", "41"),
        (41, "41"),
        (["a", "b"], "a"),
        ('["a", "b"]', "a"),
        ("[sic] a", "[sic] a"),
        (None, None),
        ([], None),
    ],
)
def test_a_rows_reference_as_one_text(given, found):
    assert reference({"reference": given}) == found


def test_where_answers_come_from_and_what_is_counted():
    found = Answers("reference")
    played, given, without = sample(two_turns("qwen3", answer="It is 41.")), samples(1)[0], samples(2)[1]
    given.task.info["reference"] = 41
    assert [found.of(item) for item in (played, given, without)] == ["It is 41.", "41", None]
    assert found.counts == {"played": 1, "reference": 1, "no reference": 1}


async def test_the_teacher_writes_what_is_missing_and_is_asked_as_a_summarizer(tmp_path):
    replies = ["It is 41.", Reply("cut", finish="length"), "", "<think>\nhm\n</think>\n\nIt is 42.", "[NO ANSWER]"]
    played = sample(two_turns("qwen3", answer="known"), 9, "q9")
    async with FakeServer(replies) as server:
        found = await write(tmp_path, server.url, [*distinct(5), played], concurrency=1)
    assert sorted((item.text or item.reason) for item in found.values()) == [
        "It is 41.", "It is 42.", "cut_off", "declined", "empty",
    ]  # fmt: skip
    assert server.count == 5, "the one that was played end to end needs none"
    payload = server.requests[0].payload
    assert [message["role"] for message in payload["messages"]] == ["system", "user"]
    assert "| 41 degrees" in payload["messages"][1]["content"] and "tools" not in payload
    counted = Answers("teacher", found)
    for item in [*distinct(5), played]:
        counted.of(item)
    assert counted.counts == {"teacher": 2, "cut_off": 1, "empty": 1, "declined": 1, "played": 1}


async def test_a_rerun_asks_only_for_what_is_missing_changed_or_failed(tmp_path):
    def script(number: int, payload: dict[str, Any]) -> Any:
        text = payload["messages"][1]["content"]
        return (
            Reply(status=400) if "Query 1?" in text and number < 3 else "[NO ANSWER]" if "Query 2?" in text else "Fine."
        )

    async with FakeServer(script) as server:
        first = await write(tmp_path, server.url, distinct(3), concurrency=1)
        assert {key: item.text or item.reason for key, item in first.items()} == {
            "q0/0": "Fine.", "q1/1": "failed", "q2/2": "declined",
        }  # fmt: skip
        (tmp_path / "answers.jsonl").open("a").write('{"torn')
        again = await write(tmp_path, server.url, distinct(4), concurrency=1)
        assert server.count == 5 and again["q1/1"].text == again["q3/3"].text == "Fine."
        await write(tmp_path, server.url, distinct(1), temperature=0.1)
        assert server.count == 6, "asked otherwise"
    assert [line["id"] for line in lines(tmp_path)] == ["q0/0", "q1/1", "q2/2", "q1/1", "q3/3", "q0/0"]


async def test_every_answer_stands_in_the_file_when_the_next_comes_and_requests_are_bounded(tmp_path):
    seen: list[int] = []

    def script(number: int, payload: dict[str, Any]) -> Reply:
        seen.append(len(lines(tmp_path)))
        return Reply("Fine.", latency_s=0.01)

    async with FakeServer(script) as server:
        await write(tmp_path, server.url, distinct(24), concurrency=3)
    assert server.peak <= 3
    assert all(done >= number - 3 for number, done in enumerate(seen))


@pytest.mark.parametrize("status", [401, 404])
async def test_a_refused_key_or_model_ends_it_at_once(tmp_path, status):
    async with FakeServer(Reply(status=status)) as server:
        with pytest.raises(ConfigError, match=rf"HTTP {status}.*Fix: check rltr.teacher.base_url"):
            await write(tmp_path, server.url, distinct(40), concurrency=2)
    assert server.count <= 6


async def test_an_endpoint_that_is_down_ends_it_and_keeps_what_came(tmp_path):
    async with FakeServer(lambda number, _: "Fine." if number < 2 else Reply(status=500)) as server:
        with pytest.raises(
            StageError, match=r"32 requests in a row have failed \(HTTP 500.*what has been written is kept"
        ):
            await write(tmp_path, server.url, distinct(60), concurrency=2)
    assert [line["answer"] for line in lines(tmp_path)].count("Fine.") == 2


async def test_a_spent_budget_ends_it(tmp_path):
    async with FakeServer("Fine.") as server:
        with pytest.raises(BudgetSpent, match="rltr.teacher.budget.tokens"):
            await write(tmp_path, server.url, distinct(9), concurrency=1, budget={"tokens": 300})
    assert 3 <= len(lines(tmp_path)) <= 4, "those in flight come to their end"


def test_no_teacher_is_a_clear_error():
    with pytest.raises(ConfigError, match="no teacher is named.*--set teacher.base_url"):
        require_source("teacher", TeacherSettings())
