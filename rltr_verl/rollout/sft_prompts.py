"""Are the contexts of the cold start those of the rollout, token by token?

A cold start whose prompts differ from the rollout's, if only by one space, can look healthy by its loss and fail in RL.
So the two real code paths are compared: verl's ``MultiTurnSFTDataset`` on one side, the planner's chat template on the
other, at the start of every assistant turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from rltr_verl.errors import GateError
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.rollout.turns import Planner


def check_prompts(
    coldstart: str | Path, tokenizer: Any, planner: Planner, rows: int = 16, max_length: int = 4096
) -> int:
    """Compare every turn's context in the first ``rows`` conversations.

    Returns the number of contexts compared.

    Raises:
        GateError: names the row and turn of the first difference and shows both sides from there on.
    """
    dataset = _dataset(str(coldstart), tokenizer, rows, max_length)
    compared = 0
    for index in range(len(dataset)):
        item = dataset[index]
        trained = list(_trained_contexts(item["input_ids"].tolist(), item["loss_mask"].tolist()))
        where = f"{coldstart}, row {index}"
        _check_roles(dataset.messages[index], where)
        rolled = list(_rollout_contexts(planner.template, dataset.messages[index], list(planner.schemas.values())))
        for turn, (sft, rollout) in enumerate(zip(trained, rolled, strict=True)):
            if sft != rollout:
                raise _difference(planner.template, f"{where}, turn {turn}", sft, rollout)
            compared += 1
    return compared


def _dataset(path: str, tokenizer: Any, rows: int, max_length: int) -> MultiTurnSFTDataset:
    config = OmegaConf.create({"pad_mode": "no_padding", "truncation": "error", "max_length": max_length})
    with redirect_stdout(StringIO()):  # verl prints the number of rows
        return MultiTurnSFTDataset([path], tokenizer, config, max_samples=rows)


def _check_roles(messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """Behind the first assistant turn a rollout adds assistant turns and tool results, nothing else."""
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    other = sorted(set(roles[first:]) - {"assistant", "tool"})
    if first == len(roles) or other:
        problem = f"a message of role '{other[0]}' follows the planner's turns" if other else "no assistant turn"
        raise GateError(problem, where=where, fix="store what tools returned with role 'tool'.")


def _trained_contexts(ids: list[int], mask: list[int]) -> Iterator[list[int]]:
    """All ids before each run of trained ones."""
    for position, trained in enumerate(mask):
        if trained and (position == 0 or not mask[position - 1]):
            yield ids[:position]


def _rollout_contexts(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], schemas: list[dict[str, Any]]
) -> Iterator[list[int]]:
    """The ids a policy would stand before at each of its turns, had it sampled what the conversation says."""
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    ids = template.prompt_ids([dict(message) for message in messages[:first]], schemas)
    observations: list[str] = []
    for message in messages[first:]:
        if message["role"] == "tool":
            observations.append(str(message["content"]))
            continue
        if observations:
            ids = ids + template.observation_ids(observations, turn_ended=False)
            observations = []
        yield ids
        ids = ids + template.encode(str(message["content"]))


def _difference(template: ChatTemplate, where: str, sft: list[int], rollout: list[int]) -> GateError:
    pairs = zip(sft, rollout, strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(sft), len(rollout)))
    shown = [repr(template.decode(ids[at : at + 24])) for ids in (sft, rollout)]
    problem = f"the cold start's prompt differs from the rollout's at token {at}: {shown[0]} against {shown[1]}"
    fix = "give the SFT rows the recipe's tools in the recipe's order and the same chat template."
    return GateError(problem, where=where, fix=fix)
