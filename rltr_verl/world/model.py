"""A tiny Qwen3-architecture planner and its tokenizer: 0.4 million weights, trained from nothing in minutes on a CPU.

The tokenizer is a byte-level BPE that can encode any text. What a planner must copy or emit in one piece (names of the
world, tags, the JSON around a call's arguments) is one token each, added as *non-special* tokens: decoding yields plain
hermes text and ``skip_special_tokens`` removes none of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 800
"""Size of the BPE part; names, tags and glue come on top."""

GLUE = (
    "system\n<tools>\n",
    "calculator(expression)\n",
    "days_between(start, end)\n",
    "search(query)\n",
    "</tools>",
    "user\n",
    "assistant\n",
    '<tool_call>\n{"name": "search", "arguments": {"query": "',
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "',
    '<tool_call>\n{"name": "days_between", "arguments": {"start": "',
    '", "end": "',
    '"}}\n</tool_call>',
    "<tool_call>",
    "</tool_call>",
    "<tool_response>\n",
    "\n</tool_response>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
)

_CHUNKS = Regex(r"\d{4}-\d{2}-\d{2}|\d+|[^\d]+")
"""Dates and numbers are chunks of their own, so that BPE learns the frequent ones, and whole phrases, as one token."""


def make_tokenizer(texts: Iterable[str], names: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the BPE part on ``texts`` and add ``names`` and the glue as tokens of their own."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(_CHUNKS, behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    added = [*GLUE, *names]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_between(texts, added), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=chat_template(),
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def _between(texts: Iterable[str], added: Iterable[str]) -> Iterator[str]:
    """What is left of the texts between added tokens: BPE never sees those, so it should not spend merges on them."""
    cut = re.compile("|".join(re.escape(text) for text in sorted(added, key=len, reverse=True)))
    for text in texts:
        yield from filter(None, cut.split(text))


def chat_template() -> str:
    """The Jinja chat template of the tiny model."""
    return Path(__file__).with_name("chat_template.j2").read_text(encoding="utf-8")


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised model for ``tokenizer``; the same seed gives the same weights.

    ``initializer_range`` 0.1 instead of the usual 0.02: at this width and in a few hundred steps, the attention circuit
    that copies a name from the query into a call does not form with the smaller value.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        use_cache=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save_model(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a Hugging Face model folder."""
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    tokenizer.save_pretrained(folder)
