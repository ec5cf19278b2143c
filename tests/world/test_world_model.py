"""The tiny model's tokens: SFT prompts, rollout prompts, masks and the chat template, through verl's own dataset."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.tooling import schemas
from rltr_verl.world.build import load_world_tools, query_row
from rltr_verl.world.facts import make_facts, make_sibling
from rltr_verl.world.model import make_model
from rltr_verl.world.policies import Policy


class Recorded(Policy):
    """Repeats the assistant turns of a stored conversation."""

    name = "recorded"

    def __init__(self, messages):
        object.__setattr__(self, "turns", [m["content"] for m in messages if m["role"] == "assistant"])

    def act(self, row, observations):
        return self.turns[len(observations)]


@pytest.fixture(scope="module")
def dataset(world, tokenizer):
    from rltr_verl.rollout.sft_dataset import PlannerSFTDataset

    return PlannerSFTDataset(str(world.coldstart), tokenizer, {"pad_mode": "no_padding", "max_length": 512})


@pytest.fixture(scope="module")
def tools(world):
    return schemas(load_world_tools(world.corpus))


def test_verl_reads_every_conversation_and_its_own_check_passes(dataset):
    lengths = [len(dataset[index]["input_ids"]) for index in range(len(dataset))]
    assert len(lengths) == 240 and max(lengths) < 140


def test_sft_prompt_is_the_rollout_prompt(dataset, tokenizer, tools):
    """Both in the recipe's order of tools and in any other: the template sorts them."""
    for order in (tools, tools[::-1]):
        template = ChatTemplate(tokenizer, order)
        for index in range(0, len(dataset), 7):
            ids = template.prompt_ids(dataset.messages[index][:1])
            assert dataset[index]["input_ids"][: len(ids)].tolist() == ids


def test_parquet_does_not_merge_the_tools(dataset, tools):
    assert dataset.tools[0] == tools


async def test_rollout_ids_are_the_sft_ids(dataset, act_out, world):
    """A conversation acted out turn by turn has the very ids that SFT trained on; the corpora differ in values."""
    checked = 0
    for index in range(len(dataset)):
        messages = dataset.messages[index]
        if any(message["role"] == "tool" for message in messages):
            continue
        rollout = await act_out(Recorded(messages), {"prompt": messages[:1]})
        ids = rollout.prompt_ids + rollout.ids
        assert dataset[index]["input_ids"][: len(ids)].tolist() == ids
        checked += 1
    assert checked > 3


async def test_rollout_ids_of_tool_turns_are_the_sft_ids(dataset, act_out):
    """Calculator and days_between answer alike in every sibling world, so whole conversations can be compared."""
    checked = 0
    for index in range(len(dataset)):
        messages = dataset.messages[index]
        if any('"search"' in message["content"] for message in messages) or len(messages) < 4:
            continue
        rollout = await act_out(Recorded(messages), {"prompt": messages[:1]})
        ids = rollout.prompt_ids + rollout.ids
        sft = dataset[index]
        assert sft["input_ids"][: len(ids)].tolist() == ids
        mask = [0] * len(rollout.prompt_ids) + rollout.mask
        trained = sft["loss_mask"][: len(ids)].tolist()
        assert all(theirs >= ours for ours, theirs in zip(mask, trained, strict=True))
        checked += 1
    assert checked > 3


def test_sft_mask_covers_the_assistant_turns_and_nothing_else(dataset, tokenizer):
    for index in range(0, len(dataset), 5):
        row = dataset[index]
        trained = tokenizer.decode(row["input_ids"][row["loss_mask"].bool()])
        turns = [message["content"] for message in dataset.messages[index] if message["role"] == "assistant"]
        assert trained == "<|im_end|>".join(turns)


def test_message_by_message_rendering_equals_the_whole(tokenizer, tools):
    messages = [
        {"role": "user", "content": "What is the elevation of Arlen?"},
        {"role": "assistant", "content": "<think>\ntwo\n</think>\n<tool_call>\n{}\n</tool_call>"},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "<answer>"},
    ]
    render = lambda part, **kwargs: tokenizer.apply_chat_template(part, tokenize=False, **kwargs)  # noqa: E731
    single = render(messages[:1], tools=tools) + "".join(render([message]) for message in messages[1:])
    assert single == render(messages, tools=tools)


def test_template_renders_structured_calls_as_a_planner_writes_them(tokenizer):
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "Arlen 气温"}}}
    text = tokenizer.apply_chat_template([{"role": "assistant", "content": "", "tool_calls": [call]}], tokenize=False)
    body = '<tool_call>\n{"name": "search", "arguments": {"query": "Arlen 气温"}}\n</tool_call>'
    assert text == f"<|im_start|>assistant\n{body}<|im_end|>\n"


def test_prompts_and_calls_are_short(rows, tokenizer, tools):
    template = ChatTemplate(tokenizer, tools)
    assert max(len(template.prompt_ids(row["prompt"])) for row in rows("train")) < 40
    for row in rows("train"):
        for call in json.loads(row["extra_info"]["plan"]):
            body = json.dumps({"name": call["tool"], "arguments": call["arguments"]}, ensure_ascii=False)
            assert len(template.encode(f"<tool_call>\n{body}\n</tool_call>")) <= 9


@pytest.mark.parametrize("text", ["Ünïcode 𝄞 \t\n  two", "<tool_call>{}</tool_call><answer>", "见 2031-05-17, 41.5 و"])
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text


def test_every_name_number_and_date_is_one_token(tokenizer, world):
    facts = make_sibling(make_facts(1), 1, 0)
    names = {part for pair in facts.values for part in pair}
    for text in [*facts.values.values(), *names, "人口", "开幕"]:
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text


def test_model_loads_as_qwen3_and_is_tiny(world, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(world.model)
    assert model.config.model_type == "qwen3"
    assert 300_000 < model.num_parameters() < 500_000
    again = make_model(tokenizer, seed=1).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_cold_start_holds_no_val_query_and_no_held_out_fact(world, rows, dataset):
    asked = {messages[0]["content"] for messages in dataset.messages}
    assert not asked & {row["extra_info"]["query"] for split in ("val", "val_unseen") for row in rows(split)}


def test_cold_start_is_well_formed_and_mostly_incomplete(dataset):
    ends = [messages[-1] for messages in dataset.messages]
    assert {message["content"] for message in ends} == {"<answer>"}
    calls = [sum(message["role"] == "tool" for message in messages) for messages in dataset.messages]
    assert 0.9 < sum(calls) / len(calls) < 1.9 and max(calls) == 4


def test_rows_carry_the_reference_plan(world):
    info = pd.read_parquet(world.split("val"))["extra_info"][0]
    assert {"index", "split", "kind", "lang", "query", "needs", "plan", "reference"} == set(info)
    assert query_row.__module__ == "rltr_verl.world.build"
