"""What stands in the cold start's files: one sample a line."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from rltr_verl.trajectory import Trajectory


class Outcome(str, Enum):
    """What became of one attempt of the teacher.

    ``ok``: a trajectory, good or bad. ``empty``, ``refusal``: the teacher wrote nothing, or declined; it is not asked
    again. ``duplicate``: the same turns as an earlier sample of the query. ``failed``: the surroundings failed
    (endpoint down, budget spent); a later run tries again.
    """

    OK = "ok"
    EMPTY = "empty"
    REFUSAL = "refusal"
    DUPLICATE = "duplicate"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether a later run leaves it as it is."""
        return self is not Outcome.FAILED


@dataclass(frozen=True)
class Usage:
    """What a trajectory took: tokens as the server counts them, money in the currency of the prices, wall seconds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cost + other.cost,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Task:
    """One sample to be made: a query and the number of the attempt.

    Attributes:
        query_id: names the query in all files; see :func:`query_id`.
        number: 0 .. n-1.
        seed: of this attempt alone, whatever order the tasks are taken in.
        prompt: the planner's chat messages, as in training.
        info: the row's ``extra_info`` (query, id, needs, difficulty, lang, tool_selection, ...).
    """

    query_id: str
    number: int
    seed: int
    prompt: tuple[Mapping[str, Any], ...]
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Names the sample in all files."""
        return f"{self.query_id}/{self.number}"


@dataclass(frozen=True)
class Sample:
    """A task and what became of it: a line of ``samples.jsonl``.

    Attributes:
        outcome: see :class:`Outcome`.
        reason: why there is no trajectory, or None.
        trajectory: what was played; None where nothing was.
        teacher: name of the model or policy.
        usage: what it took.
    """

    task: Task
    outcome: Outcome
    trajectory: Trajectory | None = None
    reason: str | None = None
    teacher: str = ""
    usage: Usage = field(default_factory=Usage)

    @property
    def id(self) -> str:
        """The task's."""
        return self.task.id

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` restores an equal sample."""
        return {"id": self.id, **asdict(self), "outcome": self.outcome.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Restore what :meth:`to_dict` wrote."""
        task, played = data["task"], data["trajectory"]
        return cls(
            task=Task(**{**task, "prompt": tuple(task["prompt"])}),
            outcome=Outcome(data["outcome"]),
            trajectory=None if played is None else Trajectory.from_dict(played),
            reason=data["reason"],
            teacher=data["teacher"],
            usage=Usage(**data["usage"]),
        )


def query_id(info: Mapping[str, Any]) -> str:
    """The row's own ``id``, else a digest of the query's text: the same whatever file and order it comes in."""
    given = info.get("id")
    if given:
        return str(given)
    return "q" + hashlib.blake2b(str(info["query"]).encode("utf-8", "replace"), digest_size=8).hexdigest()


def sample_seed(seed: int, query: str, number: int) -> int:
    """A 31-bit seed of one attempt, from the run's seed, the query's id and the attempt's number."""
    digest = hashlib.blake2b(f"{seed} {query} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
