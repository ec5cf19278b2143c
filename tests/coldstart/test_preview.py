"""The preview shows what is trained, and nothing in a row steers the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from rltr_verl.coldstart.preview import CONTEXT, TRAINED, coloured
from rltr_verl.rollout.sft_rows import RowBuilder
from tests.coldstart.export_kit import call, template_of, tokenizer_of
from tests.fakes.families import TOOLS

HOSTILE = "[bold red]x[/] [/nope] \x1b[31mred\x07 \x9b2J \u202e [link=http://e.vil]y[/link]"


def preview(*messages: dict, policy: str = "action_only"):
    template = template_of("qwen3")
    row = RowBuilder(tokenizer_of("qwen3"), template, policy).build(
        [{"role": "user", "content": "q"}, *messages], TOOLS
    )
    return coloured(row.input_ids, row.loss_mask, template.decode)


def styled(text, style: str) -> str:
    return "".join(text.plain[span.start : span.end] for span in text.spans if span.style == style)


def test_trained_tokens_stand_out_and_special_ones_are_shown():
    turn = {"role": "assistant", "content": f"<think>\nr\n</think>\n\n{call()}"}
    text = preview(turn, {"role": "tool", "content": "41"}, {"role": "assistant", "content": "<answer>"})
    assert styled(text, TRAINED) == f"{call()}<|im_end|><answer>"
    assert "<think>\nr" in styled(text, CONTEXT) and "<|im_start|>user" in styled(text, CONTEXT)


def test_text_is_never_markup_nor_control():
    turn = {"role": "assistant", "content": f"{HOSTILE} <answer>"}
    buffer = io.StringIO()
    Console(file=buffer, force_terminal=True, width=400).print(preview(turn, policy="all_assistant"), soft_wrap=True)
    shown = buffer.getvalue()
    assert "[bold red]x[/] [/nope]" in shown and "[link=http://e.vil]y[/link]" in shown
    assert "\\x1b[31mred\\x07 \\x9b2J \\u202e" in shown
    assert "\x1b[31m" not in shown and "\x07" not in shown and "\u202e" not in shown
