"""What became of a trajectory's calls, tool by tool, as numbers under keys that are the same for a whole run."""

from __future__ import annotations

from collections.abc import Iterable

from rltr_verl.trajectory import TOOL_SIDE, Status, Trajectory

TOOL_METRICS_FIELD = "rltr_tool_metrics"
"""Key of verl's ``extra_fields`` that holds :func:`tool_metrics` as JSON text on its way to the reward manager."""

_FIGURES = ("calls", "ok", "bad_arguments", "timeouts", "faults", "seconds")


def tool_metrics(trajectory: Trajectory, tools: Iterable[str]) -> dict[str, float]:
    """``{"tool/<name>/<figure>": value}`` for every tool of ``tools``, zeros included.

    Figures of a trajectory: ``calls`` that were taken up, of them ``ok``, ``bad_arguments``, ``timeouts`` and all
    ``faults`` of the surroundings (timeouts included), and the ``seconds`` that they took, summed.
    """
    metrics = {f"tool/{name}/{figure}": 0.0 for name in tools for figure in _FIGURES}
    for item in trajectory.executed():
        key = f"tool/{item.call.name}/"
        if key + "calls" not in metrics or item.status is Status.NOT_EXECUTED:
            continue
        metrics[key + "calls"] += 1
        metrics[key + "ok"] += item.status is Status.OK
        metrics[key + "bad_arguments"] += item.status is Status.BAD_ARGUMENTS
        metrics[key + "timeouts"] += item.status is Status.TIMEOUT
        metrics[key + "faults"] += item.status in TOOL_SIDE
        metrics[key + "seconds"] += item.observation.seconds
    return metrics
