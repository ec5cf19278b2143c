"""How verl's own SFT dataset reads the same file: with the ids of the rollout, with others, or not at all.

:class:`PlannerSFTDataset` does not depend on this. It matters to whoever trains on an exported file without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from rltr_verl.rollout.mask_check import first_difference
from rltr_verl.rollout.sft_dataset import PlannerSFTDataset
from rltr_verl.rollout.sft_prompts import open_dataset


@dataclass
class StockComparison:
    """Rows by what verl's dataset makes of them.

    Attributes:
        same: the ids of the rollout; behind the last of them it may close the turn.
        differs: other ids.
        refused: an error, such as its own check of the rendering.
        why: where the first row that differs does, or the first error.
    """

    same: int = 0
    differs: int = 0
    refused: int = 0
    why: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"same": self.same, "differs": self.differs, "refused": self.refused, "why": self.why}


def compare_with_stock(
    file: str | Path, tokenizer: Any, data: Mapping[str, Any] | None = None, rows: int = 64
) -> StockComparison:
    """Read the first ``rows`` rows of a file through both datasets. ``data``: settings of verl's node ``data``."""
    ours = open_dataset(file, tokenizer, data, rows)
    config = {"pad_mode": "no_padding", "truncation": "error", "max_length": 2**20, **(data or {})}
    with redirect_stdout(StringIO()):
        stock = MultiTurnSFTDataset([str(file)], tokenizer, OmegaConf.create(config), max_samples=rows)
    found = StockComparison()
    for index in range(len(ours)):
        _add(found, ours, stock, index)
    return found


def _add(found: StockComparison, ours: PlannerSFTDataset, stock: MultiTurnSFTDataset, index: int) -> None:
    row = ours.row(index)
    try:
        theirs = stock[index]["input_ids"].tolist()
    except Exception as error:  # whatever verl or the template raises says that it cannot read the row
        found.refused += 1
        found.why = found.why or f"row {index}: {type(error).__name__}: {_first_line(error)}"
        return
    mine = row.input_ids
    at = first_difference(mine, theirs[: len(mine)])
    if at is None:
        found.same += 1
        return
    found.differs += 1
    decode = ours.builder(index).template.decode
    shown = [repr(decode(ids[at : at + 12])[:60]) for ids in (theirs, mine)]
    found.why = found.why or f"row {index}, token {at}: {shown[0]} where the rollout has {shown[1]}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160] if str(error).strip() else ""
