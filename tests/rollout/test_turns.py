"""Masks and turns: what is trained is exactly what was sampled. The engine is scripted; tokenizer, template, parser and
tools are real."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import sys
from dataclasses import dataclass

import pytest
from transformers import AutoTokenizer

from rltr_verl.config import load_settings
from rltr_verl.errors import DataError
from rltr_verl.rollout.turns import Planner, Rollout, take_turns
from rltr_verl.trajectory import Status, Turn
from rltr_verl.world import build_world


@dataclass
class Output:
    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None = "completed"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_world(tmp_path_factory.mktemp("world") / "w", seed=1)


@pytest.fixture(scope="module")
def tokenizer(world):
    return AutoTokenizer.from_pretrained(world.model)


def planner(world, tokenizer, **rollout) -> Planner:
    tools = {"tools": ["search", "calculator"], "tool_settings": {"search": {"corpus": str(world.corpus)}}}
    return Planner.build(load_settings({**tools, "rollout": {"max_turns": 5, **rollout}}), tokenizer)


def call(name: str, **arguments: str) -> str:
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def play(
    planner: Planner, texts: list[str], limit: int = 400, ids: list[list[int]] | None = None, row: dict | None = None
) -> Rollout:
    """Take turns with an engine that samples the given texts (or ids); log-probs count the sampled tokens."""
    encode = planner.template.encode
    outputs = iter(ids if ids is not None else [encode(text) for text in texts])
    counter = itertools.count(1)

    async def generate(prompt: list[int], max_tokens: int) -> Output:
        assert prompt == rollout.prompt_ids + rollout.ids
        token_ids = next(outputs)[:max_tokens]
        return Output(token_ids, [-float(next(counter)) for _ in token_ids])

    rollout = Rollout(planner.template.prompt_ids([{"role": "user", "content": "What is 40 + 2?"}]), limit)
    await take_turns(planner, rollout, generate, list(planner.schemas), row)
    return rollout


def spans(rollout: Rollout) -> list[tuple[int, list[int]]]:
    pairs = itertools.groupby(zip(rollout.mask, rollout.ids, strict=True), key=lambda pair: pair[0])
    return [(bit, [token for _, token in group]) for bit, group in pairs]


async def test_trained_spans_are_the_policys_text_and_the_stop_marker_is_trained(world, tokenizer):
    made = planner(world, tokenizer)
    texts = [call("calculator", expression="40 + 2") + "<|im_end|>", "<answer>"]
    rollout = await play(made, texts)
    assert rollout.end == "answer"
    trained = [made.template.decode(ids) for bit, ids in spans(rollout) if bit == 1]
    assert trained == texts == [turn.text for turn in rollout.turns]
    between = [made.template.decode(ids) for bit, ids in spans(rollout) if bit == 0]
    assert len(between) == 1 and "42" in between[0] and "calculator" not in between[0]
    assert rollout.turns[0].observations[0].status is Status.OK


async def test_log_probs_stay_beside_their_tokens(world, tokenizer):
    rollout = await play(planner(world, tokenizer), [call("calculator", expression="1 + 1") + "<|im_end|>", "<answer>"])
    sampled = [value for value, bit in zip(rollout.log_probs, rollout.mask, strict=True) if bit]
    assert sampled == [-float(n) for n in range(1, sum(rollout.mask) + 1)]
    assert all(value == 0 for value, bit in zip(rollout.log_probs, rollout.mask, strict=True) if not bit)


async def test_sampled_ids_are_kept_although_their_text_would_be_encoded_otherwise(world, tokenizer):
    made = planner(world, tokenizer)
    text = "plan "
    other = [token for char in text for token in made.template.encode(char)]
    assert other != made.template.encode(text) and made.template.decode(other) == text
    ids = other + made.template.encode("<answer>")
    rollout = await play(made, [], ids=[ids])
    assert rollout.ids == ids and rollout.mask == [1] * len(ids)


async def test_an_unreadable_call_is_answered_and_the_loop_goes_on(world, tokenizer):
    broken = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 1"}\n</tool_call><|im_end|>'
    rollout = await play(planner(world, tokenizer), [broken, "<answer>"])
    assert rollout.end == "answer"
    assert rollout.turns[0].calls[0].error and rollout.turns[0].observations[0].status is Status.UNREADABLE


async def test_every_call_of_a_turn_gets_its_observation_in_order(world, tokenizer):
    made = planner(world, tokenizer, max_parallel_calls=2)
    text = "\n".join(call("calculator", expression=f"{n} + 0") for n in (11, 22, 33)) + "<|im_end|>"
    rollout = await play(made, [text, "<answer>"])
    seen = rollout.turns[0].observations
    assert [item.text for item in seen[:2]] == ["11", "22"]
    assert seen[2].status is Status.NOT_EXECUTED
    context = made.template.decode([token for bit, ids in spans(rollout) if bit == 0 for token in ids])
    assert context.index("11") < context.index("22") < context.index("Not executed")


@pytest.mark.parametrize(
    ("texts", "options", "limit", "end"),
    [
        (["just words<|im_end|>"], {}, 400, "no_call"),
        ([call("calculator", expression="1 + 1") + "<|im_end|>"] * 3, {"max_turns": 3}, 400, "turn_limit"),
        (["word " * 100], {}, 20, "length"),
        ([call("calculator", expression="1 + 1") + "<|im_end|>", "<answer>"], {}, 30, "length"),
        ([""], {}, 400, "aborted"),
    ],
)
async def test_how_a_trajectory_can_end(world, tokenizer, texts, options, limit, end):
    made = planner(world, tokenizer, **options)
    limit = limit if end != "length" or len(texts) == 1 else len(made.template.encode(texts[0])) + 4
    rollout = await play(made, texts, limit)
    assert rollout.end == end
    assert len(rollout.ids) == len(rollout.mask) == len(rollout.log_probs) <= limit


async def test_the_last_turns_calls_are_not_run_when_nothing_can_follow(world, tokenizer):
    rollout = await play(
        planner(world, tokenizer, max_turns=1), [call("calculator", expression="1 + 1") + "<|im_end|>"]
    )
    trajectory = rollout.trajectory("q", {})
    assert [item.status for item in trajectory.executed()] == [Status.NOT_EXECUTED]
    assert trajectory.n_calls == 0


async def test_tools_outside_the_rows_selection_are_neither_shown_nor_run(world, tokenizer):
    made = planner(world, tokenizer)
    assert list(made.shown({"tool_selection": ["calculator"]})) == ["calculator"]
    assert list(made.shown({"tool_selection": []})) == list(made.shown(None)) == ["search", "calculator"]


@pytest.mark.parametrize("chosen", [5, True, [["calculator"]], [None], {"calculator": 0, "x": 1}])
def test_a_selection_that_is_no_list_of_names_is_refused(world, tokenizer, chosen):
    with pytest.raises(DataError, match="row 7: field 'extra_info.tool_selection' names"):
        planner(world, tokenizer).shown({"tool_selection": chosen, "index": 7})


def test_a_selection_of_unknown_tools_is_refused(world, tokenizer):
    made = planner(world, tokenizer)
    with pytest.raises(DataError, match="row 7: field 'extra_info.tool_selection' names 'serach'.*search, calculator"):
        made.shown({"tool_selection": ["calculator", "serach"], "index": 7})


STATEFUL = '''
from rltr_verl import tool

LOG = []

@tool
class Counter:
    def open(self, row):
        self.count = row.get("start", 0)
        LOG.append("open")

    @tool
    def more(self) -> str:
        """Count on."""
        self.count += 1
        return f"count {self.count}"

    def close(self):
        LOG.append("close")
'''


@pytest.fixture
def counter(tmp_path, tokenizer):
    path = tmp_path / "counter.py"
    path.write_text(STATEFUL)
    made = Planner.build(load_settings({"tools": [str(path)], "rollout": {"max_turns": 5}}), tokenizer)
    module = next(value for name, value in sys.modules.items() if str(getattr(value, "__file__", "")) == str(path))
    return made, module.LOG


async def test_a_tool_with_state_counts_over_the_turns_of_a_trajectory(counter):
    made, log = counter
    rollout = await play(made, [call("more") + "<|im_end|>", call("more") + "<|im_end|>", "<answer>"], row={"start": 4})
    assert [turn.observations[0].text for turn in rollout.turns[:2]] == ["count 5", "count 6"]
    assert log == ["open", "close"]


@pytest.mark.parametrize("how", ["aborted", "engine fails", "cancelled"])
async def test_tools_with_state_are_closed_however_the_trajectory_ends(counter, how):
    made, log = counter
    waiting = asyncio.Event()

    async def generate(prompt: list[int], max_tokens: int) -> Output:
        if not log:
            return Output(made.template.encode(call("more") + "<|im_end|>"), None)
        if how == "engine fails":
            raise RuntimeError("out of memory")
        if how == "cancelled":
            waiting.set()
            await asyncio.sleep(600)
        return Output([], None, "aborted")

    rollout = Rollout(made.template.prompt_ids([{"role": "user", "content": "q"}]), 400)
    task = asyncio.create_task(take_turns(made, rollout, generate, list(made.schemas)))
    if how == "cancelled":
        await waiting.wait()
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert log == ["open", "close"]
    assert how != "aborted" or rollout.end == "aborted"


@pytest.mark.parametrize(("cut", "seen"), [("head", "a"), ("tail", "z"), ("middle", "az")])
async def test_long_observations_are_cut_as_the_recipe_says(tmp_path, tokenizer, cut, seen):
    path = tmp_path / "long.py"
    body = 'def long() -> str:\n    """Long."""\n    return "aa " * 4000 + "bb " * 2000000 + "zz " * 4000\n'
    path.write_text(f"from rltr_verl import tool\n\n@tool\n{body}")
    rollout = {"max_observation_tokens": 64, "observation_cut": cut}
    made = Planner.build(load_settings({"tools": [str(path)], "rollout": rollout}), tokenizer)
    played = await play(made, [call("long") + "<|im_end|>", "<answer>"])
    text = played.turns[0].observations[0].text
    assert set(text.replace("...[cut]...", "").split()) <= {letter * n for letter in seen for n in (1, 2)}
    assert len(made.template.encode(text)) <= 64
    context = made.template.decode([token for bit, ids in spans(played) if bit == 0 for token in ids])
    assert text in context


async def test_calls_beyond_max_parallel_calls_are_each_told(world, tokenizer):
    made = planner(world, tokenizer, max_parallel_calls=1)
    text = "\n".join(call("calculator", expression=f"{n} + 0") for n in (1, 2, 3)) + "<|im_end|>"
    played = await play(made, [text, "<answer>"])
    statuses = [item.status for item in played.turns[0].observations]
    assert statuses == [Status.OK, Status.NOT_EXECUTED, Status.NOT_EXECUTED]
    assert all("Not executed" in item.text for item in played.turns[0].observations[1:])


async def test_calls_are_read_as_the_planner_says(world, tokenizer):
    made = planner(world, tokenizer)
    read = dataclasses.replace(made, read=lambda text: Turn(text, stopped=True))
    assert (await play(read, ["anything"])).end == "answer"
