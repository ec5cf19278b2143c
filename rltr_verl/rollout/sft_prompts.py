"""Are the contexts of the cold start those of the rollout, token by token?

A cold start whose prompts differ from the rollout's, if only by one space, can look healthy by its loss and fail in RL.
So the two real code paths are compared: the SFT trainer's dataset on one side, the planner's chat template on the
other, at the start of every assistant turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rltr_verl.errors import GateError
from rltr_verl.rollout.sft_dataset import PlannerSFTDataset
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.rollout.turns import Planner

_DATA = {"pad_mode": "no_padding", "truncation": "error", "max_length": 4096}


def check_prompts(
    coldstart: str | Path, tokenizer: Any, planner: Planner, rows: int = 16, data: Mapping[str, Any] | None = None
) -> int:
    """Compare every turn's context in the first ``rows`` conversations.

    Args:
        coldstart: parquet file of conversations.
        tokenizer: of the model that is trained, with its chat template.
        planner: the rollout's side, with the tools it will show.
        rows: how many conversations.
        data: settings of verl's node ``data`` (keys, template arguments, lengths) that the SFT trainer will use.

    Returns the number of contexts compared.

    Raises:
        GateError: names the row and turn of the first difference and shows both sides from there on; or verl's dataset
            refuses the conversation.
        DataError: a row's tools cannot be read.
    """
    dataset = _dataset(str(coldstart), tokenizer, rows, data or {})
    compared = 0
    for index in range(len(dataset)):
        where = f"{coldstart}, row {index}"
        _check_roles(dataset.messages[index], where)
        ids, mask = _item(dataset, index, where)
        runs = list(_trained_runs(mask))
        sampled = [ids[start : _turn_end(planner.template, ids, start, end)] for start, end in runs]
        schemas = list(planner.schemas.values())
        rolled = list(_rollout_contexts(planner.template, dataset.messages[index], sampled, schemas))
        for turn, ((start, _), rollout) in enumerate(zip(runs, rolled, strict=True)):
            if ids[:start] != rollout:
                raise _difference(planner.template, f"{where}, turn {turn}", ids[:start], rollout)
            compared += 1
    return compared


def _dataset(path: str, tokenizer: Any, rows: int, data: Mapping[str, Any]) -> PlannerSFTDataset:
    config = OmegaConf.create({**_DATA, **data, "pad_mode": "no_padding", "shuffle": False})
    with redirect_stdout(StringIO()):  # verl prints the number of rows
        return PlannerSFTDataset([path], tokenizer, config, max_samples=rows)


def _item(dataset: PlannerSFTDataset, index: int, where: str) -> tuple[list[int], list[int]]:
    """Ids and loss mask of a conversation. verl refuses with a bare AssertionError or ValueError."""
    try:
        item = dataset[index]
    except AssertionError:
        problem = (
            "rendered message by message, as verl trains it, the conversation differs from the whole one's rendering"
        )
        fix = "use a chat template that renders every message on its own, or data.ignore_input_ids_mismatch=true."
        raise GateError(problem, where=where, fix=fix) from None
    except ValueError as error:
        fix = "raise data.max_length or drop the row."
        raise GateError(f"verl refuses the conversation ({error})", where=where, fix=fix) from None
    return item["input_ids"].tolist(), item["loss_mask"].tolist()


def _check_roles(messages: Sequence[Mapping[str, Any]], where: str) -> None:
    """Behind the first assistant turn a rollout adds assistant turns and tool results, nothing else."""
    roles = [message["role"] for message in messages]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    other = sorted(set(roles[first:]) - {"assistant", "tool"})
    if first == len(roles) or other:
        problem = f"a message of role '{other[0]}' follows the planner's turns" if other else "no assistant turn"
        raise GateError(problem, where=where, fix="store what tools returned with role 'tool'.")


def _trained_runs(mask: list[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of trained ids: the assistant's turns."""
    edges = [at for at, (before, now) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if before != now]
    yield from zip(edges[::2], edges[1::2], strict=True)


def _turn_end(template: ChatTemplate, ids: list[int], start: int, end: int) -> int:
    """Where the template's own end of a turn begins: a policy samples no more than that."""
    ends = [at for at in range(start, end) if ids[at] in template.eos_ids]
    return ends[-1] if ends else end


def _rollout_contexts(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    sampled: Sequence[list[int]],
    schemas: list[dict[str, Any]],
) -> Iterator[list[int]]:
    """The ids a policy would stand before at each of its turns, had it sampled what the conversation trains."""
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    ids = template.prompt_ids([dict(message) for message in messages[:first]], schemas)
    turns = iter(sampled)
    observations: list[str] = []
    for message in messages[first:]:
        if message["role"] == "tool":
            observations.append(str(message.get("content", "")))
            continue
        if observations:
            ids = ids + template.observation_ids(observations, turn_ended=False)
            observations = []
        yield ids
        ids = ids + next(turns, [])


def _difference(template: ChatTemplate, where: str, sft: list[int], rollout: list[int]) -> GateError:
    pairs = zip(sft, rollout, strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(sft), len(rollout)))
    shown = [repr(template.decode(ids[at : at + 24])) for ids in (sft, rollout)]
    problem = f"the cold start's prompt differs from the rollout's at token {at}: {shown[0]} against {shown[1]}"
    fix = "give the SFT rows the recipe's tools in the recipe's order and the same chat template."
    return GateError(problem, where=where, fix=fix)
