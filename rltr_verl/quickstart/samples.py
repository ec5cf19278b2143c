"""Sample trajectories, before and after, for people to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltr_verl.trajectory import Trajectory

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """A line of a trajectory: ``role`` is call, result, stop or text."""

    role: str
    text: str


@dataclass(frozen=True)
class Sample:
    """One query, and what the planner did for it before and after RL."""

    query: str
    kind: str
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    completeness: tuple[float, float]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Lines of a file that :func:`rltr_verl.quickstart.evaluation.write_trajectories` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def pick_samples(before: Sequence[Record], after: Sequence[Record], count: int = 2) -> list[Sample]:
    """Queries of different kinds on which RL changed most: completeness first, then the number of calls."""
    pairs = sorted(zip(before, after, strict=True), key=lambda pair: _change(*pair), reverse=True)
    chosen: dict[str, Sample] = {}
    for old, new in pairs:
        if len(chosen) < count and old["kind"] not in chosen:
            chosen[old["kind"]] = _sample(old, new)
    return list(chosen.values())


def steps_of(trajectory: Trajectory) -> tuple[Step, ...]:
    """What the planner wrote and saw, call by call."""
    found: list[Step] = []
    for turn in trajectory.turns:
        for index, call in enumerate(turn.calls):
            found.append(Step("call", _call_text(call.name, call.arguments, call.raw)))
            if index < len(turn.observations):
                found.append(Step("result", turn.observations[index].text))
        if turn.stopped:
            found.append(Step("stop", "stops: <answer>"))
        elif not turn.calls:
            found.append(Step("text", turn.text))
    return tuple(found)


def _change(old: Record, new: Record) -> tuple[float, float]:
    return new["completeness"] - old["completeness"], new["calls"] - old["calls"]


def _sample(old: Record, new: Record) -> Sample:
    before, after = (steps_of(Trajectory.from_dict(record["trajectory"])) for record in (old, new))
    return Sample(old["query"], old["kind"], before, after, (old["completeness"], new["completeness"]))


def _call_text(name: str | None, arguments: Mapping[str, Any] | None, raw: str) -> str:
    if arguments is None:
        return f"unreadable call: {raw}"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
