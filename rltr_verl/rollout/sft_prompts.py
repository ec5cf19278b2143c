"""Are the contexts of the cold start those of the rollout, token by token?

A cold start whose prompts differ from the rollout's, if only by one space, can look healthy by its loss and fail in RL.
So two sides are compared at the start of every assistant turn: the SFT trainer's dataset, with the tools and the
settings of its files, and the planner's chat template with the tools of its recipe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rltr_verl.errors import DataError, GateError
from rltr_verl.rollout.mask_check import first_difference
from rltr_verl.rollout.sft_dataset import PlannerSFTDataset
from rltr_verl.rollout.sft_rows import SftRow
from rltr_verl.rollout.sft_turns import FIXES, RowRefused
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.rollout.turns import Planner

_DATA = {"pad_mode": "no_padding", "truncation": "error", "max_length": 4096}
_SELECTION = "tool_selection"


def check_prompts(
    coldstart: str | Path, tokenizer: Any, planner: Planner, rows: int = 16, data: Mapping[str, Any] | None = None
) -> int:
    """Compare every turn's context in the first ``rows`` conversations.

    Args:
        coldstart: parquet file of conversations.
        tokenizer: of the model that is trained, with its chat template.
        planner: the rollout's side, with the tools it will show.
        rows: how many conversations; -1 is all.
        data: settings of verl's node ``data`` (keys, template arguments, lengths) that the SFT trainer will use.

    Returns the number of contexts compared.

    Raises:
        GateError: names the row and turn of the first difference and shows both sides from there on; or the
            conversation cannot be trained.
        DataError: a row's tools cannot be read.
    """
    dataset = open_dataset(coldstart, tokenizer, data, rows)
    compared = 0
    for index in range(len(dataset)):
        where = f"{coldstart}, row {index}"
        try:
            row = dataset.row(index)
        except RowRefused as refusal:
            raise GateError(refusal.problem, where=where, fix=FIXES[refusal.kind]) from None
        compared += _compare(row, dataset, index, planner, where)
    return compared


@dataclass
class RowCheck:
    """What a file's rows came to.

    Attributes:
        rows: how many there are.
        tokens, trained: ids of all rows that can be trained, and how many of them are.
        refused: rows that cannot be trained, by kind (:data:`rltr_verl.rollout.sft_turns.FIXES`).
        first: number and refusal of the first such row.
    """

    rows: int = 0
    tokens: int = 0
    trained: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    first: tuple[int, RowRefused] | None = None


def check_rows(dataset: PlannerSFTDataset, on_row: Callable[[], None] | None = None) -> RowCheck:
    """Make every row as the trainer will, and check its turns and its mask; ``on_row`` is called behind each."""
    found = RowCheck(rows=len(dataset))
    for index in range(len(dataset)):
        try:
            row = dataset.row(index)
            dataset.builder(index).check_turns(row, row.conversation)
            found.tokens += len(row.prompt_ids) + len(row.ids)
            found.trained += sum(row.mask)
        except RowRefused as refusal:
            found.refused[refusal.kind] += 1
            found.first = found.first or (index, refusal)
        if on_row:
            on_row()
    return found


def require_rows(file: str, found: RowCheck) -> None:
    """Refuse a file with rows that cannot be trained.

    Raises:
        DataError: counts them by kind and names the first.
    """
    if found.first is None:
        return
    number, refusal = found.first
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.refused.most_common())
    total = sum(found.refused.values())
    problem = f"{total} of {found.rows} rows cannot be trained ({kinds}); this is the first: {refusal}"
    raise DataError(problem, where=f"{file}, row {number}", fix=FIXES[refusal.kind])


def open_dataset(
    file: str | Path, tokenizer: Any, data: Mapping[str, Any] | None = None, rows: int = -1
) -> PlannerSFTDataset:
    """The dataset that verl's SFT trainer will use, in the file's order."""
    config = OmegaConf.create({**_DATA, **(data or {}), "pad_mode": "no_padding", "shuffle": False})
    with redirect_stdout(StringIO()):  # verl prints the number of rows
        return PlannerSFTDataset([str(file)], tokenizer, config, max_samples=rows)


def _compare(row: SftRow, dataset: PlannerSFTDataset, index: int, planner: Planner, where: str) -> int:
    """Hold each turn's context against the planner's; returns their number."""
    turns = row.turns
    for turn, (span, rolled) in enumerate(zip(turns, _rollout_contexts(row, dataset, index, planner), strict=True)):
        context = row.prompt_ids + row.ids[: span.start]
        if first_difference(context, rolled) is not None:
            raise difference(planner.template, f"{where}, turn {turn}", context, rolled)
    return len(turns)


def _rollout_contexts(row: SftRow, dataset: PlannerSFTDataset, index: int, planner: Planner) -> Iterator[list[int]]:
    """The ids a policy would stand before at each of its turns, had it sampled what the conversation holds."""
    template = planner.template
    selection = dataset.selections[index] if dataset.selections is not None else None
    shown = planner.shown({_SELECTION: selection, "index": index})
    ids = template.prompt_ids(row.conversation.prompt, list(shown.values()))
    for turn, span in zip(row.conversation.turns, row.turns, strict=True):
        yield ids
        sampled = row.ids[span.start : span.end]
        ids = ids + sampled
        if turn.observations:
            ids = ids + template.observation_ids(turn.observations, turn_ended=template.ends_turn(sampled))


def difference(template: ChatTemplate, where: str, sft: list[int], rollout: list[int]) -> GateError:
    """The error for a context that is not the rollout's; shows both from the first difference on."""
    at = first_difference(sft, rollout) or 0
    shown = [repr(template.decode(ids[at : at + 24])) for ids in (sft, rollout)]
    problem = f"the cold start's prompt differs from the rollout's at token {at}: {shown[0]} against {shown[1]}"
    return GateError(problem, where=where, fix=FIXES["prompt"])
