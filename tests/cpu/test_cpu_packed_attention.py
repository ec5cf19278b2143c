"""Attention over packed sequences: each sees itself only, whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.nn.functional import scaled_dot_product_attention
from transformers import GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config

from rltr_verl.cpu import packed_attention as packed
from rltr_verl.errors import ModelError

LENGTHS = (5, 1, 9)
HEADS, KEY_HEADS, SIZE = 4, 2, 8


@pytest.fixture
def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(1, heads, sum(LENGTHS), SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def one_by_one(inputs: list[torch.Tensor]) -> torch.Tensor:
    """Causal attention, one sequence after another."""
    parts = zip(*(tensor.split(LENGTHS, dim=2) for tensor in inputs), strict=True)
    out = [scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
    return torch.cat(out, dim=2).transpose(1, 2)


def positions() -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in LENGTHS])[None]


def test_output_and_gradients_are_those_of_each_sequence_alone(inputs):
    out, weights = packed.packed_attention(torch.nn.Module(), *inputs, None, position_ids=positions())
    alone = one_by_one(inputs)
    assert weights is None
    torch.testing.assert_close(out, alone)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    ours, theirs = (torch.autograd.grad((result * direction).sum(), inputs) for result in (out, alone))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("given", [None, torch.zeros(2, 15, dtype=torch.long)], ids=["none", "a padded batch's"])
def test_without_the_positions_of_a_packed_row_it_refuses(inputs, given):
    with pytest.raises(ModelError, match="positions of one packed row"):
        packed.packed_attention(torch.nn.Module(), *inputs, None, position_ids=given)


@pytest.mark.parametrize(
    ("config", "fits"),
    [
        (Qwen3Config(), True),
        (Qwen2Config(), True),
        (LlamaConfig(), True),
        (GemmaConfig(), False),
        (Qwen2Config(use_sliding_window=True, sliding_window=16, max_window_layers=0), False),
    ],
    ids=["qwen3", "qwen2", "llama", "another kind", "sliding window"],
)
def test_only_models_of_known_kinds_with_full_attention_fit(config, fits):
    assert packed.fits(config) is fits


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_engine_packs_where_it_can_and_pads_where_the_user_chose_otherwise(tiny_model, attention):
    from verl.workers.config import HFModelConfig

    from rltr_verl.cpu.engine import pack_where_possible

    config = HFModelConfig(path=tiny_model, override_config={"attn_implementation": attention}).hf_config
    assert pack_where_possible(config) is (attention == "sdpa")
    assert config._attn_implementation == (packed.NAME if attention == "sdpa" else attention)


def test_columns_of_objects_are_left_out_of_a_batch():
    from rltr_verl.cpu.engine import without_objects

    stacks = {key: NonTensorStack("a", "b") for key in ("raw_prompt", "multi_modal_inputs")}
    data = TensorDict({"input_ids": torch.ones(2, 3), **stacks, "temperature": NonTensorData(1.0)}, batch_size=2)
    assert set(without_objects(data).keys()) == {"input_ids", "multi_modal_inputs", "temperature"}
