"""What RL did, step by step: from the trajectories that the reward manager dumped and verl's metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltr_verl.quickstart.progress import MetricsTail, read_metrics

Curves = dict[int, dict[str, float]]
"""Figures by step."""

FROM_METRICS = ("response_length/mean", "timing_s/step", "timing_s/gen")
"""What is taken from verl's own metrics."""


class TrajectoryFigures:
    """Means per RL step over the trajectories in a dump folder that is still growing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[Path, MetricsTail] = {}
        self._rows: dict[int, list[dict[str, float]]] = defaultdict(list)

    def read(self) -> Curves:
        """Means of all steps so far: reward, completeness, calls, penalties, share of well-formed trajectories."""
        for path in self._folder.glob("*.jsonl"):
            for record in self._tails.setdefault(path, MetricsTail(path)).new_lines():
                if record.get("global_steps") is not None:
                    self._rows[int(record["global_steps"])].append(_figures(record))
        return {step: _means(rows) for step, rows in sorted(self._rows.items())}


def read_curves(dumps: list[Path], metrics: list[Path]) -> Curves:
    """Figures of all steps of a run; ``dumps`` and ``metrics`` in the order of attempts, a later one counts."""
    found: Curves = {}
    for folder in dumps:
        found.update(TrajectoryFigures(folder).read())
    for step, values in read_metrics(metrics).items():
        found.setdefault(step, {}).update({key: values[key] for key in FROM_METRICS if key in values})
    return dict(sorted(found.items()))


def _figures(record: Mapping[str, Any]) -> dict[str, float]:
    metrics = record["metrics"]
    figures = {
        "completeness": metrics.get("acc"),
        "calls": metrics.get("calls"),
        "penalties": metrics.get("repeat", 0.0) + metrics.get("error", 0.0),
        "format_ok": metrics.get("format_ok"),
        "reward": record.get("total"),
    }
    return {key: float(value) for key, value in figures.items() if value is not None}


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each figure over the rows that have it: an unscored trajectory has no reward."""
    keys = {key for row in rows for key in row}
    return {key: _mean([row[key] for row in rows if key in row]) for key in sorted(keys)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
