"""What needs no judge: trajectories that gathered nothing, whatever they say about themselves.

These run before a judge is asked. A judge can be talked into a verdict by an empty or one-character text ("master
keys", arXiv 2507.08794); a count of successful calls cannot. Only calls and statuses are looked at, never text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rltr_verl.judge.checklist import parse_needs
from rltr_verl.trajectory import TOOL_SIDE, Status, Trajectory


def deterministic_verdict(
    trajectory: Trajectory, row: Mapping[str, Any], no_call: Literal["zero", "ask"] = "zero"
) -> float | None:
    """0.0 where the calls cannot be complete, None where a judge has to say. Never 1.

    Args:
        trajectory: calls with typed observations.
        row: the query's data. ``needs: []`` says that the query needs no tool; then nothing is decided here.
        no_call: what a trajectory without any call gets: ``zero``, or ``ask`` where queries may need no tool.

    Returns:
        None if a call succeeded or met a fault of its tool (a timeout is not the policy's mistake). Otherwise 0.0: no
        call was made, or all were unreadable, refused for the policy's own mistake, or not executed.

    Raises:
        DataError: ``needs`` is given in an unreadable form.
    """
    if parse_needs(row.get("needs"), f"row {row.get('index', row.get('id', '?'))}") == ():
        return None
    statuses = {item.status for item in trajectory.executed()}
    if not statuses:
        return 0.0 if no_call == "zero" else None
    return None if statuses & {Status.OK, *TOOL_SIDE} else 0.0
