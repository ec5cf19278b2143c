"""Tokenizers of several model families: one small byte-level BPE with each family's added tokens and chat template."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rltr_verl.rollout.template import ChatTemplate

TEMPLATES = Path(__file__).parents[1] / "templates"

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]

_TEXT = (
    "search the facts about the town, then think and answer. The temperature of Arlen is 41 degrees; having said that, "
    'call the calculator: {"name": "search", "arguments": {"query": "population of Arlen"}} '
    "结果 巴黎的人口是多少？ 41 + 1 = 42"
)
_MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@dataclass(frozen=True)
class Family:
    """``special`` and ``markup`` are added tokens; ``end`` is what a policy samples behind a turn with calls."""

    name: str
    template: str
    end: str
    special: list[str]
    markup: list[str] = field(default_factory=lambda: _MARKUP)
    kwargs: dict[str, Any] = field(default_factory=dict)
    eos: str | None = None


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3", "qwen3", "<|im_end|>", _CHATML),
        Family("qwen3-no-think", "qwen3", "<|im_end|>", _CHATML, kwargs={"enable_thinking": False}),
        Family("qwen2.5", "qwen2_5", "<|im_end|>", _CHATML, markup=["<tool_call>", "</tool_call>"]),
        Family(
            "llama3",
            "llama3",
            "<|eot_id|>",
            ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
            markup=[],
        ),
        Family(
            "llama3.1",
            "llama3_1",
            "<|eot_id|>",
            ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
            markup=[],
        ),
        Family(
            "glm4",
            "glm4",
            "<|observation|>",
            ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
            eos="<|endoftext|>",
        ),
    )
}


@cache
def tokenizer_of(name: str) -> Any:
    """The family's tokenizer; one object per process."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=family.special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in family.markup])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=family.special[0],
        eos_token=family.eos or family.end,
        pad_token=family.special[0],
    )
    fast.chat_template = (TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8")
    return fast


@cache
def template_of(name: str) -> ChatTemplate:
    """The family's chat template, with one tool shown."""
    return ChatTemplate(tokenizer_of(name), TOOLS, FAMILIES[name].kwargs)
