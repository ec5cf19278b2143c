"""A tiny model and the CPU backend for the tests of ``rltr_verl.cpu``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("VERL_PLATFORM", "cpu")  # the tests are about the CPU on a machine with a GPU as well

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _save_tokenizer(folder: Path) -> int:
    """Write a byte-level tokenizer with a Qwen-style chat template; return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return len(fast)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random Qwen3 of two layers with its tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_qwen3")
    config = Qwen3Config(
        vocab_size=_save_tokenizer(folder),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def cpu_backend() -> None:
    """verl in this process, with the CPU backend active."""
    import verl  # noqa: F401

    from rltr_verl import cpu

    cpu.activate()


@pytest.fixture(scope="module")
def one_rank(cpu_backend: None):
    """A gloo group of this process alone, opened as verl opens it in a worker."""
    import torch.distributed
    from verl.utils import distributed

    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        distributed.initialize_global_process_group_ray()
        yield
        torch.distributed.destroy_process_group()
