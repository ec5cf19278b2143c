"""From verl's metric files to a live progress bar."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class MetricsTail:
    """Reads a growing JSONL file of verl's ``file`` logger; a line still being written is left for later."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> list[tuple[int, dict[str, float]]]:
        """``(step, metrics)`` of the lines completed since the last call; what is not a number is left out."""
        return [(int(line["step"]), _numbers(line["data"])) for line in self.new_lines()]

    def new_lines(self) -> list[dict[str, Any]]:
        """The complete lines since the last call, decoded."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            block = file.read()
        complete = block[: block.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines() if line.strip()]


def read_metrics(files: list[Path]) -> dict[int, dict[str, float]]:
    """Metrics per step; where files overlap (a run that was resumed), the later file counts."""
    found: dict[int, dict[str, float]] = {}
    for path in files:
        found.update(MetricsTail(path).new())
    return dict(sorted(found.items()))


@contextmanager
def progress_bar(console: Console, name: str, total: int) -> Iterator[StageBar]:
    """A bar for one stage, at most 80 columns wide; off a terminal, only its last state is printed."""
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(bar_width=18),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim"),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        yield StageBar(progress, name, total)


class StageBar:
    """The bar of a stage: pulses until the first step is there."""

    def __init__(self, progress: Progress, name: str, total: int) -> None:
        self._progress, self._total = progress, total
        self._task = progress.add_task(name, total=None, count="starting", note="")
        self.done = 0

    def to(self, done: int, note: str = "") -> None:
        """``done`` steps are finished; ``note`` stands behind the bar."""
        self.done = done
        count = f"{done}/{self._total}"
        self._progress.update(self._task, total=self._total, completed=done, count=count, note=note)

    def advance(self) -> None:
        """One more."""
        self.to(self.done + 1)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}


def sft_note(step: int, metrics: Mapping[str, float]) -> str:
    """What to show of an SFT step."""
    return f"loss {metrics['train/loss']:.3f}" if "train/loss" in metrics else ""


def rl_note(metrics: Mapping[str, float]) -> str:
    """What to show of an RL step, as far as it is there."""
    shown = {"reward": "reward", "complete": "completeness", "s/step": "timing_s/step"}
    return "  ".join(f"{name} {metrics[key]:.2f}" for name, key in shown.items() if key in metrics)
