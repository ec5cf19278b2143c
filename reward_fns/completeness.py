"""R_comp: is the sequence of tool calls complete for the query? (RLTR 3.2, Eq. 2)

R_comp is the mean of N votes of a checker, each 0 (a needed call is missing) or 1 (nothing is missing). The final
answer is not looked at, so no reference answer is needed. N is not given in the paper; see ``rltr.judge``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rltr_verl.judge import Checker
from rltr_verl.reward import RewardTerm, TermResult
from rltr_verl.trajectory import Trajectory


class Completeness(RewardTerm):
    """Mean of the checker's readable votes; raises ``Unscored`` when the checker could not tell."""

    metric_keys = ("acc", "votes")

    def __init__(self, *, checker: Checker) -> None:
        self.checker = checker

    async def score(self, trajectory: Trajectory, row: Mapping[str, Any]) -> TermResult:
        """``acc`` is R_comp before the weight (verl's core validation metric), ``votes`` counts the readable votes."""
        votes = await self.checker.check(trajectory, row)
        metrics = {"acc": votes.mean, "votes": float(len(votes.readable))}
        return TermResult(votes.mean, metrics, {"votes": list(votes.values), **votes.record})
