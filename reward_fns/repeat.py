"""R_repeat: calls that ask again what was just asked. (RLTR 3.2, Algorithm 1 line 11)

R_repeat = -lambda times the number of repeated calls. The paper counts a call identical to the one before it; with
several calls in a turn we read "before" as: made earlier in the same turn or in the directly preceding turn, whatever
the order. Identical is :meth:`rltr_verl.trajectory.ToolCall.key`. A call that was not executed is no repeat and is
not remembered; a call that failed on the tool's side may be made again. lambda is not given in the paper; 0.1 is
ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from rltr_verl.reward import RewardTerm, TermResult
from rltr_verl.trajectory import TOOL_SIDE, Status, Trajectory

Scope = Literal["consecutive", "any"]


def count_repeats(trajectory: Trajectory, scope: Scope = "consecutive") -> int:
    """Number of executed calls that repeat a remembered one.

    ``consecutive`` remembers the calls of this turn and of the turn before; ``any`` remembers the whole trajectory.
    """
    before: dict[str, int] = {}
    repeats = 0
    for item in trajectory.executed():
        if item.status is Status.NOT_EXECUTED:
            continue
        key = item.call.key()
        reach = item.turn if scope == "any" else 1
        repeats += key in before and item.turn - before[key] <= reach
        if item.status not in TOOL_SIDE:
            before[key] = item.turn
    return repeats


class Repeat(RewardTerm):
    """-lambda times the repeats, at most ``cap`` in all (None: no limit)."""

    metric_keys = ("repeats",)

    def __init__(
        self,
        *,
        lambda_: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1,
        scope: Scope = "consecutive",
        cap: Annotated[float, Field(ge=0)] | None = None,
    ) -> None:
        self.lambda_, self.scope, self.cap = lambda_, scope, cap

    def measure(self, trajectory: Trajectory) -> Mapping[str, float]:
        return {"repeats": float(count_repeats(trajectory, self.scope))}

    async def score(self, trajectory: Trajectory, row: Mapping[str, Any]) -> TermResult:
        """Charge the repeats."""
        found = self.measure(trajectory)
        charge = self.lambda_ * found["repeats"]
        return TermResult(-charge if self.cap is None else -min(charge, self.cap), found)
