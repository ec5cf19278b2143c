"""What every completeness checker offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rltr_verl.trajectory import Trajectory


@dataclass(frozen=True)
class Votes:
    """Votes on one trajectory, in the order asked; None is a vote without a readable verdict.

    ``record`` is free JSON for the per-trajectory dump: prompt version, needs met, why votes failed.
    """

    values: tuple[float | None, ...]
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def readable(self) -> tuple[float, ...]:
        """The votes that carry a verdict."""
        return tuple(vote for vote in self.values if vote is not None)

    @property
    def mean(self) -> float:
        """R_comp of RLTR Eq. 2: the sum of the readable votes over their number (at least one is needed)."""
        return sum(self.readable) / len(self.readable)


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
