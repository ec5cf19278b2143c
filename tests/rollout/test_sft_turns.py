"""Messages of any provenance as the turns of a rollout, and rows of them through the trainer's dataset."""

from __future__ import annotations

import pickle
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from rltr_verl.errors import ConfigError, DataError
from rltr_verl.rollout.sft_dataset import PlannerSFTDataset
from rltr_verl.rollout.sft_stock import compare_with_stock
from rltr_verl.rollout.sft_turns import TurnStyle, read_conversation
from rltr_verl.rollout.template import ChatTemplate
from tests.fakes.families import FAMILIES, TOOLS, template_of, tokenizer_of

USER = {"role": "user", "content": "q"}


def search(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "search", "arguments": arguments}}


def stored(folder: Path, *rows: dict[str, Any]) -> Path:
    """As parquet gives rows back: structs merged, lists as arrays."""
    pd.DataFrame(list(rows)).to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def dataset(file: Path, family: str = "qwen3", cls: type = PlannerSFTDataset, **config: Any) -> Any:
    with redirect_stdout(StringIO()):
        return cls([str(file)], tokenizer_of(family), {"pad_mode": "no_padding", "max_length": 4096, **config})


def trained(found: Any, index: int = 0, family: str = "qwen3") -> str:
    item = found[index]
    return template_of(family).decode(item["input_ids"][item["loss_mask"].bool()].tolist())


THOUGHTS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "reasoning_content": "r1", "content": "", "tool_calls": [search({"query": "x"})]},
    {"role": "tool", "content": "t"},
    {"role": "assistant", "reasoning_content": "r2", "content": "done"},
]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'


@pytest.mark.parametrize("thinking", [True, None])
@pytest.mark.parametrize("family", ["qwen3", "qwen2.5", "llama3"])
def test_s01a_thoughts_of_every_turn_are_trained_exactly_once(tmp_path, thinking, family):
    row = {"messages": THOUGHTS, **({} if thinking is None else {"enable_thinking": thinking})}
    found = dataset(stored(tmp_path, row), family)
    end = template_of(family).glue.turn_end
    text = trained(found, family=family)
    assert text == f"<think>\nr1\n</think>\n\n{CALL}{end}<think>\nr2\n</think>\n\ndone{end}"
    assert text.count("r1") == text.count("r2") == 1


def test_where_the_prompt_closes_the_thought_none_is_trained(tmp_path):
    found = dataset(stored(tmp_path, {"messages": THOUGHTS, "enable_thinking": False}))
    assert trained(found) == f"{CALL}<|im_end|>done<|im_end|>"
    whole = template_of("qwen3").decode(found[0]["input_ids"].tolist())
    assert whole.count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 2, "the generation prompt of each turn"


def test_rows_with_and_without_enable_thinking_stand_in_one_file(tmp_path):
    rows = [{"messages": THOUGHTS, "enable_thinking": value} for value in (True, None, False)]
    found = dataset(stored(tmp_path, *rows))
    assert ["r1" in trained(found, index) for index in range(3)] == [True, True, False]
    assert dataset(stored(tmp_path, *rows), enable_thinking_default=False).enable_thinking == [True, False, False]


PREFILLED = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if '</think>' not in m.content %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
"""As the thinking models of Qwen3 do: the generation prompt opens the thought."""


@pytest.fixture
def prefilled(monkeypatch):
    monkeypatch.setattr(tokenizer_of("qwen3"), "chat_template", PREFILLED)
    return ChatTemplate(tokenizer_of("qwen3"), TOOLS)


def test_where_the_prompt_opens_the_thought_the_turn_begins_inside_it(prefilled):
    style = TurnStyle(prefilled)
    assert style.opened == "<think>\n" and style.opens_thought and not style.closes_thought
    assert style.text(THOUGHTS[1]) == f"r1\n</think>\n\n{CALL}"
    assert style.text({"role": "assistant", "content": "<think>\nr\n</think>\n\nx"}) == "r\n</think>\n\nx"
    assert style.text({"role": "assistant", "content": "r\n</think>\n\nx"}) == "r\n</think>\n\nx"
    assert style.text({"role": "assistant", "content": "x"}) == "\n</think>\n\nx"


@pytest.mark.parametrize("family", FAMILIES)
def test_how_each_familys_turns_end(family):
    style = TurnStyle(template_of(family))
    assert style.last_end == ("<|endoftext|>" if family == "glm4" else FAMILIES[family].end)
    assert style.closes_thought == (family == "qwen3-no-think") and not style.opens_thought
    turn, last = {"role": "assistant", "content": CALL}, {"role": "assistant", "content": "x <answer>\n"}
    messages = [USER, turn, {"role": "tool", "content": "t"}, last]
    found = read_conversation(messages, style)
    assert [turn.sampled for turn in found.turns] == [CALL + FAMILIES[family].end, "x <answer>"]
    ended = {**turn, "content": f"{CALL}{FAMILIES[family].end}\n"}
    assert read_conversation([USER, ended, *messages[2:]], style) == found


@pytest.mark.parametrize("arguments", [{"query": "x"}, '{"query": "x"}'])
@pytest.mark.parametrize("content", [None, "", [{"type": "text", "text": ""}]])
def test_arguments_as_text_or_object_and_content_that_is_null_are_one(arguments, content):
    message = {"role": "assistant", "content": content, "tool_calls": [search(arguments)]}
    assert TurnStyle(template_of("qwen3")).text(message) == CALL


def test_parquets_keys_are_not_shown(tmp_path):
    """Merged structs: ``query`` and ``expression`` in every call, a None in every message."""
    other = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1"}}}
    calls = {"role": "assistant", "content": None, "tool_calls": [search({"query": "x"}), other]}
    rows = [{"messages": [USER, calls, {"role": "tool", "content": "t"}, {"role": "assistant", "content": "<answer>"}]}]
    text = trained(dataset(stored(tmp_path, *rows)))
    second = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
    assert text == f"{CALL}\n{second}<|im_end|><answer>"


S02 = [
    {"role": "system", "content": "s"},
    USER,
    {"role": "assistant", "content": "", "tool_calls": ["a", "b"]},
    {"role": "tool", "content": "1"},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "done"},
]


@pytest.mark.parametrize("results", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "qwen2.5"])
def test_s02a_the_results_of_one_turn_share_an_envelope(tmp_path, results, family):
    messages = [message for message in S02 if results == 2 or message["content"] != "2"]
    found = dataset(stored(tmp_path, {"messages": messages}), family)
    item = found[0]
    whole = template_of(family).decode(item["input_ids"].tolist())
    shown = "".join(f"\n<tool_response>\n{number}\n</tool_response>" for number in range(1, results + 1))
    assert f"<|im_end|>\n<|im_start|>user{shown}<|im_end|>\n<|im_start|>assistant\n" in whole
    assert "tool_response" not in trained(found, family=family)


def test_s04a_a_row_that_would_lose_its_end_is_named(tmp_path):
    long = {"messages": [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "ok"}]}
    found = dataset(stored(tmp_path, {"messages": THOUGHTS}, long), max_length=64 + 100)
    assert len(found[0]["input_ids"]) <= 164
    with pytest.raises(DataError, match=r"rows.parquet, row 1: \d+ tokens, 164 allowed: it would lose its end.*Fix: "):
        found[1]


PADDED = {"pad_mode": "right", "max_length": 30}
CONFIGS = [
    {},
    {"pad_mode": "right", "max_length": 200},
    {**PADDED, "truncation": "left"},
    {**PADDED, "truncation": "right"},
    {"max_length": 30, "truncation": "right"},
    {"max_length": 30, "truncation": "left"},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_an_item_is_what_verls_dataset_returns(tmp_path, config):
    """Where the template renders both alike, item by item; behind the last id verl closes the turn."""
    row = {"messages": [USER, {"role": "assistant", "content": "All is known, so this is the answer."}]}
    ours, verls = (
        dataset(stored(tmp_path, row), "llama3", cls, **config)[0] for cls in (PlannerSFTDataset, MultiTurnSFTDataset)
    )
    assert ours.keys() == verls.keys()
    for name, values in ours.items():
        assert values.dtype == verls[name].dtype and torch.equal(values, verls[name]), name


def test_it_can_be_handed_to_workers(tmp_path):
    found = dataset(stored(tmp_path, {"messages": THOUGHTS}))
    first = found[0]
    found.tokenizer = None
    copied = pickle.loads(pickle.dumps(found))
    copied.tokenizer = tokenizer_of("qwen3")
    assert torch.equal(copied[0]["input_ids"], first["input_ids"])


def test_the_loss_policy_is_the_settings_else_the_files_else_the_default(tmp_path):
    file = stored(tmp_path, {"messages": THOUGHTS, "loss": "action_only"})
    assert trained(dataset(file)) == f"{CALL}<|im_end|>done<|im_end|>"
    assert "r2" in trained(dataset(file, rltr_loss="action+final_think"))
    assert "r1" not in trained(dataset(file, rltr_loss="action+final_think"))
    assert "r1" in trained(dataset(stored(tmp_path, {"messages": THOUGHTS})))
    with pytest.raises(ConfigError, match="no loss policy 'all'.*data.rltr_loss|data.rltr_loss: no loss policy 'all'"):
        dataset(file, rltr_loss="all")


def test_how_verls_own_dataset_reads_a_row_is_told(tmp_path):
    def compared(family: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return compare_with_stock(stored(tmp_path, {"messages": messages}), tokenizer_of(family)).to_dict()

    calls = {"role": "assistant", "content": f"<think>\na\n</think>\n\n{CALL}\n{CALL}"}
    last = {"role": "assistant", "content": "<think>\nb\n</think>\n\n<answer>"}
    two = [USER, calls, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, last]
    assert compared("qwen3", [USER, calls, two[2], last])["same"] == 1
    assert compared("qwen3", two)["refused"] == 1
    assert compared("llama3", two)["same"] == 1
    plain = compared("qwen3", [USER, {"role": "assistant", "content": "<answer>"}])
    assert plain["differs"] == 1 and "'<think>" in plain["why"]
