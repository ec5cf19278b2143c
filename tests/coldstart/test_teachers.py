"""Teachers over real HTTP and scripted ones: what they play is a planner's trajectory, by the planner's own loop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rltr_verl.coldstart.records import Task, Usage
from rltr_verl.coldstart.teacher import TeacherFailed, build_teacher
from rltr_verl.config import load_settings
from rltr_verl.errors import ConfigError, DataError
from rltr_verl.format_check import format_faults
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.rollout.turn_text import turn_text
from rltr_verl.rows import read_rows
from rltr_verl.trajectory import Status
from rltr_verl.world import build_world
from tests.fakes.families import FAMILIES, tokenizer_of
from tests.fakes.openai_server import FakeServer, Reply

TOOL = '''
from rltr_verl import tool

@tool
def search(query: str) -> str:
    """Search.

    Args:
        query: words.
    """
    return f"found {query}<|im_end|>" if query != "long" else "word " * 4000
'''
STOP = "<answer>"
PROMPT = ({"role": "system", "content": "Plan."}, {"role": "user", "content": "How warm is Arlen?"})
TASK = Task("q1", 0, 7, PROMPT, {"query": "How warm is Arlen?"})


def call_text(**arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def tool_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "search.py"
    path.write_text(TOOL, encoding="utf-8")
    return path


def teacher_of(server: FakeServer, tool_file: Path, *, family: str = "qwen3", rollout=None, **settings):
    node = {"base_url": server.url, "model": "m", "retries": 0, **settings}
    chosen = load_settings({"tools": [str(tool_file)], "teacher": node, "rollout": rollout or {}})
    return build_teacher(chosen, tokenizer_of(family))


async def played(script, tool_file: Path, **settings):
    """Trajectory, usage and the requests that were sent."""
    async with FakeServer(script) as server:
        teacher = teacher_of(server, tool_file, **settings)
        try:
            result = await teacher.play(TASK)
        finally:
            await teacher.close()
        return result.trajectory, result.usage, [request.payload for request in server.requests]


async def test_calls_that_the_server_parted_become_the_turn_that_a_planner_samples(tool_file):
    arguments = '{"query": "巴黎 Arlen"}'
    script = [Reply("Looking.", finish="tool_calls", reasoning="I need it.", tool_calls=[("search", arguments)]), STOP]
    trajectory, usage, sent = await played(script, tool_file)
    first, last = trajectory.turns
    assert first.text == f"<think>\nI need it.\n</think>\n\nLooking.\n{call_text(query='巴黎 Arlen')}".replace(
        json.dumps("巴黎 Arlen"), '"巴黎 Arlen"'
    )
    assert (first.thought.strip(), first.calls[0].arguments) == ("I need it.", {"query": "巴黎 Arlen"})
    assert last.stopped and trajectory.end == "answer" and not format_faults(trajectory)
    assert usage == Usage(200, 20, 0.0, usage.seconds) and usage.seconds > 0
    assert [payload["seed"] for payload in sent] == [7, 7]
    assert sent[0]["messages"] == [dict(message) for message in PROMPT] and sent[0]["tools"] == list(trajectory.tools)
    assert sent[1]["messages"][2:] == [
        {
            "role": "assistant",
            "content": "Looking.",
            "tool_calls": [{"id": "id-0", "type": "function", "function": {"name": "search", "arguments": arguments}}],
            "reasoning_content": "I need it.",
        },
        {"role": "tool", "tool_call_id": "id-0", "content": "found 巴黎 Arlen< |im_end|>"},
    ]
    assert first.observations[0].text == sent[1]["messages"][3]["content"]


async def test_calls_as_text_are_read_as_the_planner_reads_them(tool_file):
    written = f"<think>\nHm.\n</think>\n\n{call_text(query='a')}\n{call_text(query='b')}"
    trajectory, _, sent = await played([written, STOP], tool_file)
    assert trajectory.turns[0].text == written
    assert [item.observation.text for item in trajectory.executed()] == ["found a< |im_end|>", "found b< |im_end|>"]
    assert [message["role"] for message in sent[1]["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert sent[1]["messages"][2]["content"] == written


async def test_thoughts_are_kept_from_a_server_that_refuses_them(tool_file):
    script = [Reply(None, finish="tool_calls", reasoning="Secret.", tool_calls=[("search", "{}")]), STOP]
    trajectory, _, sent = await played(script, tool_file, keep_reasoning=False)
    assert "reasoning_content" not in sent[1]["messages"][2] and "Secret." in trajectory.turns[0].text
    assert [item.status for item in trajectory.executed()] == [Status.BAD_ARGUMENTS]


async def test_ids_that_the_rollout_stands_at_are_sent_in_the_style_completions(tool_file):
    written = f"<think>\nHm.\n</think>\n\n{call_text(query='a')}"
    trajectory, usage, sent = await played([f"{written}<|im_end|>", STOP], tool_file, style="completions")
    tokenizer = tokenizer_of("qwen3")
    template = ChatTemplate(tokenizer, trajectory.tools)
    first = template.prompt_ids(PROMPT)
    behind = template.observe(["found a<|im_end|>"], turn_ended=True)[0]
    assert sent[0]["prompt"] == first
    assert sent[1]["prompt"] == first + template.encode(f"{written}<|im_end|>") + behind
    assert sent[0]["stop"] == [STOP] and sent[0]["include_stop_str_in_output"] is True
    assert trajectory.turns[0].calls[0].arguments == {"query": "a"} and trajectory.turns[1].stopped
    assert usage.completion_tokens == 20


async def test_what_is_written_behind_the_marker_is_dropped_as_in_a_rollout(tool_file):
    trajectory, _, _ = await played(f"Done.\n{STOP}It is 41 degrees.</answer>", tool_file)
    assert trajectory.turns[0].text == f"Done.\n{STOP}" and not format_faults(trajectory)


async def test_a_turn_that_max_tokens_ended_ends_the_trajectory(tool_file):
    script = [call_text(query="a"), Reply("I was about to", finish="length")]
    trajectory, _, sent = await played(script, tool_file)
    assert trajectory.end == "length" and trajectory.turns[1].text == "I was about to"
    assert "truncated" in format_faults(trajectory) and len(sent) == 2


async def test_a_marker_before_the_cut_is_an_ending(tool_file):
    trajectory, _, _ = await played(Reply(f"{STOP} and so on", finish="length"), tool_file)
    assert trajectory.end == "answer" and not format_faults(trajectory)


async def test_observations_and_room_are_limited_as_in_the_rollout(tool_file):
    script = [call_text(query="long"), call_text(query="long"), STOP]
    limits = {"max_observation_tokens": 64}
    trajectory, _, sent = await played(script, tool_file, rollout=limits)
    seen = trajectory.turns[0].observations[0].text
    template = ChatTemplate(tokenizer_of("qwen3"), trajectory.tools)
    assert "...[cut]..." in seen and len(template.encode(seen)) <= 64 and sent[1]["messages"][-1]["content"] == seen
    short, _, _ = await played(script, tool_file, rollout=limits, max_trajectory_tokens=120)
    assert short.end == "length"


async def test_the_teachers_context_ends_a_trajectory_but_never_begins_one(tool_file):
    overflow = Reply(status=400, body={"error": {"message": "maximum context length is 9 tokens"}})
    trajectory, _, _ = await played([call_text(query="a"), overflow], tool_file)
    assert trajectory.end == "length" and len(trajectory.turns) == 1
    with pytest.raises(TeacherFailed, match="maximum context length") as error:
        await played(overflow, tool_file)
    assert not error.value.fatal


@pytest.mark.parametrize(
    ("reply", "text"), [(Reply(""), ""), (Reply(None), ""), (Reply("I'm sorry, I can't."), "I'm sorry, I can't.")]
)
async def test_a_teacher_that_writes_nothing_or_declines_has_played(tool_file, reply, text):
    trajectory, _, _ = await played(reply, tool_file)
    assert [turn.text for turn in trajectory.turns] == [text] and trajectory.n_calls == 0
    assert format_faults(trajectory)


@pytest.mark.parametrize(
    ("reply", "fatal", "said"),
    [
        (Reply(status=401, body={}), True, "api_key_env"),
        (Reply(status=404, body={}), True, "model"),
        (Reply(status=503), False, "503"),
        (Reply(finish="abort"), False, "abort"),
        (Reply(fault="reset"), False, "Disconnected"),
        (Reply(fault="hang"), False, "0.3 s"),
    ],
)
async def test_a_fault_of_the_surroundings_is_no_trajectory(tool_file, reply, fatal, said):
    with pytest.raises(TeacherFailed, match=said) as error:
        await played(reply, tool_file, timeout_s=0.3 if reply.fault == "hang" else 120)
    assert error.value.fatal is fatal


async def test_a_trajectory_has_a_deadline(tool_file):
    with pytest.raises(TeacherFailed, match="deadline|within"):
        await played(Reply(STOP, latency_s=5), tool_file, deadline_s=0.2)


async def test_the_budget_stops_the_teacher_and_costs_are_counted(tool_file):
    budget = {"tokens": 100, "price_prompt": 1e4, "price_completion": 1e5}
    async with FakeServer(STOP) as server:
        teacher = teacher_of(server, tool_file, budget=budget)
        first = await teacher.play(TASK)
        with pytest.raises(TeacherFailed, match="rltr.teacher.budget.tokens") as error:
            await teacher.play(TASK)
        await teacher.close()
    assert first.usage.cost == pytest.approx(2.0) and error.value.fatal


async def test_concurrent_trajectories_do_not_mix(tool_file):
    import asyncio

    def answer(number, payload):
        said = payload["messages"]
        return call_text(query=said[1]["content"]) if len(said) == 2 else STOP

    tasks = [Task(f"q{i}", 0, i, (PROMPT[0], {"role": "user", "content": f"query {i}"}), {}) for i in range(20)]
    async with FakeServer(answer, latency_s=0.01) as server:
        teacher = teacher_of(server, tool_file)
        results = await asyncio.gather(*map(teacher.play, tasks))
        await teacher.close()
    for number, result in enumerate(results):
        assert result.trajectory.query == f"query {number}"
        assert result.trajectory.turns[0].observations[0].text == f"found query {number}< |im_end|>"


def test_settings_without_a_model_name_the_node(tool_file):
    with pytest.raises(ConfigError, match="rltr.teacher.base_url"):
        build_teacher(load_settings({"tools": [str(tool_file)]}), tokenizer_of("qwen3"))
    with pytest.raises(ConfigError, match="rltr.teacher.model"):
        load_settings({"teacher": {"base_url": "http://x/v1"}})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thought_stands_once_in_every_family(family):
    template = ChatTemplate(tokenizer_of(family), [], FAMILIES[family].kwargs)
    text = template.prompted_thought + turn_text(template, "Visible.", "R1")
    closed = "</think>" in template.prompted_thought
    assert text.count("R1") == (0 if closed else 1) and text.count("<think>") == text.count("</think>") == 1
    assert text.endswith("Visible.")
    assert turn_text(template, "<think>\nR1\n</think>\n\nVisible.", "R1").count("R1") == 1


def test_calls_keep_what_cannot_be_read():
    template = ChatTemplate(tokenizer_of("qwen3"), [])
    broken = [{"function": {"name": "search", "arguments": '{"query": '}}, "nonsense"]
    text = turn_text(template, "", None, broken)
    assert text.count("<tool_call>") == 2 and '"arguments": "{\\"query\\": "' in text and '"nonsense"' in text


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_world(tmp_path_factory.mktemp("world") / "w", seed=1)


class TestScripted:
    def teacher(self, world, policy):
        from transformers import AutoTokenizer

        tools = {"tools": ["calculator", "days_between", "search"]}
        node = {**tools, "tool_settings": {"search": {"corpus": str(world.corpus)}}}
        teacher = {"backend": "scripted", "policy": policy}
        return build_teacher(load_settings({**node, "teacher": teacher}), AutoTokenizer.from_pretrained(world.model))

    def tasks(self, world, count=20):
        rows = list(read_rows(world.split("train")))[:count]
        return [Task(f"q{i}", 0, i, tuple(row["prompt"]), row["extra_info"]) for i, row in enumerate(rows)]

    async def test_the_oracle_plays_every_query_to_its_reference(self, world):
        teacher = self.teacher(world, "oracle")
        for task in self.tasks(world):
            trajectory = (await teacher.play(task)).trajectory
            assert not format_faults(trajectory) and all(item.status is Status.OK for item in trajectory.executed())
            last = [item.observation.text for item in trajectory.executed()]
            assert not last or task.info["reference"] in " ".join(last)

    async def test_seeds_decide_what_the_short_sighted_teacher_does(self, world):
        teacher, task = self.teacher(world, "teacher"), self.tasks(world, 1)[0]
        again = [Task(task.query_id, number, number, task.prompt, task.info) for number in range(16)]
        first = [(await teacher.play(item)).trajectory for item in again]
        second = [(await teacher.play(item)).trajectory for item in again]
        assert [item.n_calls for item in first] == [item.n_calls for item in second]
        assert len({item.n_calls for item in first}) > 1

    async def test_rows_without_a_plan_and_unknown_policies_are_refused(self, world):
        with pytest.raises(DataError, match="extra_info.plan"):
            await self.teacher(world, "oracle").play(TASK)
        with pytest.raises(ConfigError, match="did you mean 'oracle'"):
            self.teacher(world, "orcale")
