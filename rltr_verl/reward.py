"""The contract of a reward term: what it gets, what it returns, and what it may not do.

How the terms of a recipe become a total is in :mod:`rltr_verl.scoring`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rltr_verl.trajectory import Trajectory


@dataclass(frozen=True)
class TermResult:
    """What a reward term found for one trajectory.

    ``value`` enters the total (after the weight). ``metrics`` are numbers with keys fixed per term class
    (:attr:`RewardTerm.metric_keys`); ``record`` is free JSON for the per-trajectory dump (votes, reasons).
    """

    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)


class RewardTerm(ABC):
    """A reward term: one file in ``reward_fns/`` or a user's own file.

    Subclasses take their settings as keyword arguments of ``__init__`` (from ``rltr.reward.terms.<name>``) and
    implement :meth:`score`. A setting whose name is a Python keyword ends in an underscore there (``lambda`` ->
    ``lambda_``); a parameter ``checker`` receives the run's completeness checker. A term that cannot tell raises
    :class:`rltr_verl.errors.Unscored`; it never returns a stand-in.
    """

    metric_keys: tuple[str, ...] = ()
    """Keys of :attr:`TermResult.metrics`, the same on every path: verl indexes all rows by the first row's keys."""

    @abstractmethod
    async def score(self, trajectory: Trajectory, row: Mapping[str, Any]) -> TermResult:
        """Value of this term for a well-formed trajectory.

        Args:
            trajectory: turns with typed observations.
            row: the query's data (``query``, ``needs``, ``reference``, ...); a missing field is absent or None.
        """

    def measure(self, trajectory: Trajectory) -> Mapping[str, float]:
        """Counts for the log that need no judge, taken of every trajectory, a malformed one too.

        Returns:
            Values for some of :attr:`metric_keys`; they never enter the total.
        """
        return {}
