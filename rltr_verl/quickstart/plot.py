"""The training curves as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rltr_verl.quickstart.curves import Curves

PANELS = (
    ("completeness", "Completeness", "share of sampled trajectories"),
    ("reward", "Total reward", "mean"),
    ("calls", "Calls a query", "mean"),
    ("penalties", "Penalties (repeat + error)", "mean"),
    ("response_length/mean", "Response length", "tokens, observations included"),
    ("timing_s/step", "Step time", "seconds, from step 2 on"),
)
INK, LINE, PALE, GRID = "#1f2933", "#2563eb", "#b9cdf9", "#e4e7eb"
SMOOTH = 5
"""Steps of the moving mean: a step's eight queries are of different kinds, so single steps scatter."""


def plot_curves(curves: Curves, path: Path, title: str) -> None:
    """Draw all panels against the RL step into a PNG file: every step pale, the moving mean in front."""
    figure = Figure(figsize=(11, 5.6), layout="constrained", facecolor="white")
    figure.suptitle(title, color=INK, fontsize=13, fontweight="bold")
    for axes, (key, name, unit) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        _panel(axes, curves, key, name, unit)
    figure.savefig(path, dpi=130)


def moving_mean(values: Sequence[float]) -> list[float]:
    """Mean of each value with the (up to) :data:`SMOOTH` - 1 before it."""
    windows = [values[max(0, end - SMOOTH) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def _panel(axes: Axes, curves: Curves, key: str, name: str, unit: str) -> None:
    points = [(step, values[key]) for step, values in curves.items() if key in values]
    if key == "timing_s/step":
        points = [point for point in points if point[0] > 1]  # the first one warms up
    axes.set_title(name, loc="left", fontsize=10, color=INK, fontweight="bold")
    axes.set_ylabel(unit, fontsize=8, color=INK)
    axes.set_xlabel("RL step", fontsize=8, color=INK)
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=PALE, linewidth=1, marker="o", markersize=2.5)
        axes.plot(steps, moving_mean(values), color=LINE, linewidth=2)
    else:
        axes.text(0.5, 0.5, "not logged", ha="center", va="center", transform=axes.transAxes, fontsize=9, color=INK)
    if key == "completeness":
        axes.set_ylim(0, 1.02)
