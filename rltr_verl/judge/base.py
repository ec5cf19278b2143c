"""What every completeness checker offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rltr_verl.trajectory import Trajectory


@dataclass(frozen=True)
class Vote:
    """One vote and what it took.

    Attributes:
        verdict: in [0, 1]; None where the reply holds no readable verdict or there is no reply.
        reason: the judge's own words for its verdict, if it gave any.
        failure: why there is no verdict; None if there is one.
        unreadable: whether there was a whole reply, but no verdict in it.
        latency_s: from the first request to the last reply, waits included; 0 from the cache.
        prompt_tokens, completion_tokens: as the server counts them, over all attempts; 0 from the cache.
        cost: of those tokens, in the currency of ``rltr.judge.budget``.
        cached: whether it came from the cache.
    """

    verdict: float | None
    reason: str | None = None
    failure: str | None = None
    unreadable: bool = False
    latency_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    cached: bool = False


@dataclass(frozen=True)
class Votes:
    """Votes on one trajectory, in the order asked.

    ``record`` is free JSON for the per-trajectory dump: prompt version, needs met.
    """

    votes: tuple[Vote, ...]
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> tuple[float | None, ...]:
        """Verdicts; None is a vote without a readable one."""
        return tuple(vote.verdict for vote in self.votes)

    @property
    def readable(self) -> tuple[float, ...]:
        """The votes that carry a verdict."""
        return tuple(value for value in self.values if value is not None)

    @property
    def mean(self) -> float:
        """R_comp of RLTR Eq. 2: the sum of the readable votes over their number (at least one is needed)."""
        return sum(self.readable) / len(self.readable)

    @property
    def agreement(self) -> float:
        """Share of the readable votes that are on the side of the majority (at least 0.5; 1 if they are unanimous)."""
        ones = sum(value >= 0.5 for value in self.readable)
        return max(ones, len(self.readable) - ones) / len(self.readable)


class Checker(ABC):
    """Judges whether the calls of a trajectory are complete for its query."""

    @abstractmethod
    async def check(self, trajectory: Trajectory, row: Mapping[str, Any]) -> Votes:
        """Votes in [0, 1] with at least one readable one.

        Raises:
            Unscored: no verdict could be had; never replaced by a number.
            DataError: the row holds what the checker needs in an unreadable form.
        """

    async def close(self) -> None:  # noqa: B027 - most checkers hold nothing open
        """Release connections."""
