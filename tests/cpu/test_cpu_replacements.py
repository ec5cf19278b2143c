"""What stands in for verl's functions on the CPU is in place, and computes the same."""

from __future__ import annotations

import importlib

import pytest
import torch

from rltr_verl.cpu import logprobs
from rltr_verl.errors import ModelError
from rltr_verl.replacements import REPLACEMENTS, Replacement


def name_of(replacement: Replacement) -> str:
    return f"{replacement.module}.{replacement.attribute}"


@pytest.mark.parametrize("replacement", [item for item in REPLACEMENTS if item.where == "cpu"], ids=name_of)
def test_in_place(cpu_backend, replacement):
    if "vllm" in replacement.module:
        pytest.importorskip("vllm", reason="vLLM is not installed here; `make venv-vllm` installs it")
    module = importlib.import_module(replacement.module)  # applied on import, which fails if verl has moved it
    assert getattr(module, replacement.attribute) is replacement.function


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
@pytest.mark.parametrize("at_once", [1 << 24, 14])
def test_log_probs_and_gradients_are_those_of_log_softmax(monkeypatch, shape, at_once):
    monkeypatch.setattr(logprobs, "_ELEMENTS_AT_ONCE", at_once)  # 14: two rows of 7 at a time
    torch.manual_seed(0)
    logits = (10 * torch.randn(*shape, 7)).requires_grad_()
    labels = torch.randint(0, 7, shape)
    weights = torch.randn(shape)

    ours = logprobs.logprobs_from_logits(logits, labels)
    expected = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    torch.testing.assert_close(ours, expected)
    gradients = [torch.autograd.grad((result * weights).sum(), logits)[0] for result in (ours, expected)]
    torch.testing.assert_close(*gradients)


def test_value_head_without_flash_attention(tiny_model):
    from transformers import AutoConfig
    from verl.utils.model import load_valuehead_model

    config = AutoConfig.from_pretrained(tiny_model, attn_implementation="flash_attention_2", num_labels=1)
    model = load_valuehead_model(tiny_model, torch.float32, config, False)
    assert model.config._attn_implementation == "sdpa"
    assert model(torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, 1)


def test_value_head_keeps_an_attention_the_user_chose(tiny_model):
    from transformers import AutoConfig
    from verl.utils.model import load_valuehead_model

    config = AutoConfig.from_pretrained(tiny_model, attn_implementation="eager", num_labels=1)
    assert load_valuehead_model(tiny_model, torch.float32, config, False).config._attn_implementation == "eager"


def test_an_architecture_without_value_head_is_named():
    from transformers import MambaConfig

    from rltr_verl.cpu.value_head import load_valuehead_model

    with pytest.raises(ModelError, match="MambaConfig"):
        load_valuehead_model("some/folder", torch.float32, MambaConfig(), False)
