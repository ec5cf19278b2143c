"""The SFT trainer's own dataset class, as the recipe names it, shows the prompts of the rollout."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer
from verl.trainer.sft_trainer import create_sft_dataset

from rltr_verl._compose import compose_recipe
from rltr_verl.config import load_settings
from rltr_verl.errors import DataError, GateError
from rltr_verl.preflight_sft import check_sft
from rltr_verl.rollout.sft_prompts import check_prompts
from rltr_verl.rollout.turns import Planner
from rltr_verl.rows import read_messages, read_tools
from rltr_verl.tooling import load_tools, schemas
from rltr_verl.world import WorldSizes, build_world
from rltr_verl.world.build import TOOL_NAMES

TOJSON = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.content %}{{ m.content }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}{{ '<tool_call>\\n' }}{{ call.function | tojson }}{{ '\\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Prints each tool's JSON as it is and merges consecutive tool results, as Qwen3's template does."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_world(tmp_path_factory.mktemp("world") / "w", sizes=WorldSizes(train=100, val=20, coldstart=100))


@pytest.fixture(params=["world", "tojson"])
def tokenizer(request, world):
    loaded = AutoTokenizer.from_pretrained(world.model)
    if request.param == "tojson":
        loaded.chat_template = TOJSON
    return loaded


def planner(world, tokenizer, tools=TOOL_NAMES) -> Planner:
    node = {"tools": list(tools), "tool_settings": {"search": {"corpus": str(world.corpus)}}}
    return Planner.build(load_settings(node), tokenizer)


def recipe(world, *overrides: str):
    given = ["sft_scale=cpu", f"rltr.world={world.folder}", "data.max_length=4096"]
    return compose_recipe("rltr_coldstart_sft", [*given, *overrides])


def with_struct_tools(world, tmp_path, names=TOOL_NAMES):
    """The world's conversations with ``tools`` as a column of structs, which parquet merges."""
    settings = {"search": {"corpus": str(world.corpus)}} if "search" in names else {}
    described = schemas(load_tools(names, settings))
    rows = [{**row, "tools": described} for row in pq.read_table(world.coldstart).to_pylist()[:8]]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "structs.parquet")
    assert "null" in json.dumps(pq.read_table(tmp_path / "structs.parquet").to_pylist()[0]["tools"])
    return tmp_path / "structs.parquet"


@pytest.mark.parametrize("column", ["JSON text", "structs"])
def test_the_recipes_dataset_starts_with_the_rollouts_prompt(world, tokenizer, tmp_path, column):
    file = world.coldstart if column == "JSON text" else with_struct_tools(world, tmp_path)
    dataset = create_sft_dataset([str(file)], recipe(world).data, tokenizer, None)
    template = planner(world, tokenizer).template
    for index in range(8):
        item = dataset[index]
        first = item["loss_mask"].tolist().index(1)
        assert item["input_ids"][:first].tolist() == template.prompt_ids(dataset.messages[index][:1])


def test_every_turns_context_is_the_rollouts(world, tokenizer):
    assert check_prompts(world.coldstart, tokenizer, planner(world, tokenizer), rows=24) > 24


def test_calls_given_as_tool_calls_are_compared_too(world, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    tokenizer.chat_template = TOJSON
    messages: list[dict] = [{"role": "user", "content": "q"}]
    for name, arguments in (("search", {"query": "Arlen"}), ("calculator", {"expression": "1"})):
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "41"}]
    made = planner(world, tokenizer)
    tools = json.dumps(list(made.schemas.values()))
    row = {"messages": [*messages, {"role": "assistant", "content": "<answer>"}], "tools": tools}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    assert check_prompts(tmp_path / "x.parquet", tokenizer, made) == 3
    dataset = create_sft_dataset([str(tmp_path / "x.parquet")], recipe(world).data, tokenizer, None)
    assert "null" not in tokenizer.decode(dataset[0]["input_ids"])


def test_tools_that_cannot_be_read_are_named_by_their_row(world, tmp_path):
    rows = pq.read_table(world.coldstart).to_pylist()[:2]
    rows[1]["tools"] = "[{"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "broken.parquet")
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    with pytest.raises(DataError, match=r"broken.parquet, row 1, 'tools': is not valid JSON.*Fix: .*json.dumps"):
        create_sft_dataset([str(tmp_path / "broken.parquet")], recipe(world).data, tokenizer, None)


def test_rows_without_tools_are_read(world, tmp_path):
    rows = pq.read_table(world.coldstart).to_pylist()[:2]
    rows[1]["tools"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "some.parquet")
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    dataset = create_sft_dataset([str(tmp_path / "some.parquet")], recipe(world).data, tokenizer, None)
    assert dataset.tools[1] is None and "<tools>" not in tokenizer.decode(dataset[1]["input_ids"])


def test_the_preflight_compares_the_prompts(world, tmp_path):
    check_sft(recipe(world))
    other = with_struct_tools(world, tmp_path, ("calculator", "days_between"))
    with pytest.raises(GateError, match=r"structs.parquet, row 0, turn 0: .*differs from the rollout's at token"):
        check_sft(recipe(world, f"data.train_files={other}", "data.train_batch_size=8"))
    none = ("rltr.tools=[]", "rltr.tool_settings={}")
    check_sft(recipe(world, f"data.train_files={other}", "data.train_batch_size=8", *none))


def test_the_preflight_counts_the_rows_that_cannot_be_trained_and_names_the_first(world):
    named = r"row 0: 98 of 100 rows cannot be trained \(98 too_long\).* tokens, 16 allowed.*Fix: raise data.max_length"
    with pytest.raises(DataError, match=named):
        check_sft(recipe(world, "data.max_length=16"))


def test_both_recipes_and_the_world_list_the_tools_in_one_order(world):
    planners = compose_recipe("rltr_planner", ["scale=cpu", f"rltr.world={world.folder}"])
    orders = [list(planners.rltr.tools), list(recipe(world).rltr.tools), list(TOOL_NAMES)]
    stored = json.loads(pq.read_table(world.coldstart).to_pylist()[0]["tools"])
    assert orders == [[tool["function"]["name"] for tool in stored]] * 3


def test_none_is_dropped_from_mappings_and_kept_in_lists():
    assert read_messages([{"role": "user", "content": "q", "name": None}]) == [{"role": "user", "content": "q"}]
    schema = {"type": "object", "properties": {"a": {"enum": ["x", None]}, "b": None}}
    assert read_tools([schema], "x") == [{"type": "object", "properties": {"a": {"enum": ["x", None]}}}]
    assert read_tools(json.dumps([schema]), "x") == [schema]
