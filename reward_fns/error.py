"""R_error: calls that no tool could take. (RLTR 3.2, Algorithm 1 line 12)

R_error = -mu times the number of calls outside of the valid actions. The paper does not define that set; ours: a call
that cannot be read, names no known tool, or breaks the tool's schema. What fails on the tool's side is never charged,
and nothing is inferred from words in an observation. mu is not given in the paper; 0.2 is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from rltr_verl.reward import RewardTerm, TermResult
from rltr_verl.trajectory import POLICY_ERRORS, Trajectory


def count_errors(trajectory: Trajectory) -> int:
    """Number of calls whose status is the policy's own mistake."""
    return sum(item.status in POLICY_ERRORS for item in trajectory.executed())


class Error(RewardTerm):
    """-mu times the policy's errors."""

    metric_keys = ("errors",)

    def __init__(self, *, mu: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.2) -> None:
        self.mu = mu

    def measure(self, trajectory: Trajectory) -> Mapping[str, float]:
        return {"errors": float(count_errors(trajectory))}

    async def score(self, trajectory: Trajectory, row: Mapping[str, Any]) -> TermResult:
        """Charge the errors."""
        found = self.measure(trajectory)
        return TermResult(-self.mu * found["errors"], found)
