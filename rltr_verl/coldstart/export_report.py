"""What an export is asked for, and what it comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltr_verl.coldstart.answers import AnswerSource
from rltr_verl.coldstart.loss import DEFAULT_LOSS, LossPolicy
from rltr_verl.judge.prompt_files import PromptPack
from rltr_verl.rollout.sft_turns import RowRefused

SETS = ("planner", "end_to_end", "summarizer")


@dataclass(frozen=True)
class ExportOptions:
    """What to export.

    Attributes:
        out: folder of the parquet files; None is the cold start's own.
        loss: what is trained of a turn.
        max_length: most ids of a row; 0 is no limit.
        answers: where answers come from that no sample holds itself.
        val_share: share of the queries whose rows go to ``*_val.parquet``.
        prompt: a summarizer prompt of the user's own.
        max_record_chars: observations in the summarizer's prompt are cut to about this many characters in all.
        template_kwargs: further arguments of the chat template, as in the planner's recipe.
        stock_rows: rows of each set that are held against verl's own dataset.
        on_answer, on_row: called behind each answer (with the reason if there is none) and each selected sample.
    """

    out: Path | None = None
    loss: LossPolicy = DEFAULT_LOSS
    max_length: int = 0
    answers: AnswerSource = "none"
    val_share: float = 0.0
    prompt: PromptPack | None = None
    max_record_chars: int = 32_000
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    stock_rows: int = 64
    on_answer: Callable[[str | None], None] | None = None
    on_row: Callable[[], None] | None = None


@dataclass
class SetReport:
    """What became of one set; ``refused`` counts by kind, ``first`` names the first row of each kind and its fault."""

    rows: int = 0
    val_rows: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    difficulties: Counter[str] = field(default_factory=Counter)
    stock: dict[str, Any] | None = None

    def refuse(self, sample: str, refusal: RowRefused) -> None:
        """Count a row that is left out."""
        self.refused[refusal.kind] += 1
        self.first.setdefault(refusal.kind, f"{sample}: {refusal}")


@dataclass
class Report:
    """What an export came to; ``export.json``."""

    selected: int = 0
    loss: str = DEFAULT_LOSS
    max_length: int = 0
    prompts_compared: bool = False
    tools_as_text: bool = False
    sets: dict[str, SetReport] = field(default_factory=lambda: {name: SetReport() for name in SETS})
    answers: Counter[str] = field(default_factory=Counter)
    files: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "sets": {name: vars(found) for name, found in self.sets.items()}}
