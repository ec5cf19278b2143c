"""``rltr coldstart select``: judge the sampled trajectories and keep the best."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rltr_verl.cli._errors import reports_errors
from rltr_verl.cli._settings import read_settings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from rltr_verl.coldstart.funnel import Funnel
    from rltr_verl.coldstart.select import Notice


_EVERY_S = 30.0
_NOTHING_KEPT, _INTERRUPTED = 1, 130
_BYTES = "read"
"""The stage of the selection that counts bytes."""


class Balance(str, Enum):
    """Whether every difficulty gets as many trajectories."""

    none = "none"
    equal = "equal"


class ToolFaults(str, Enum):
    """What happens to a trajectory in which a tool failed."""

    keep = "keep"
    drop = "drop"


class JudgedBy(str, Enum):
    """Who judges; ``auto``: rltr.judge where it is set, else the teacher."""

    auto = "auto"
    teacher = "teacher"
    settings = "settings"


@reports_errors
def select(
    folder: Annotated[Path, typer.Option("--dir", help="Folder of the cold start, with samples.jsonl.")],
    keep: Annotated[int, typer.Option(min=1, help="Trajectories a query may keep.")] = 1,
    min_score: Annotated[
        float | None, typer.Option(min=0, max=1, help="Lowest score kept; by default more than half of the votes.")
    ] = None,
    held_out: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Queries that must not be trained on; may be repeated.")
    ] = None,
    near: Annotated[
        float, typer.Option(min=0.01, max=1, help="Jaccard similarity of trigrams that makes a near duplicate.")
    ] = 0.8,
    balance: Annotated[
        Balance, typer.Option(help="equal: no difficulty keeps more than the smallest one times --balance-ratio.")
    ] = Balance.none,
    balance_ratio: Annotated[float, typer.Option(min=0.01, help="See --balance.")] = 1.0,
    tool_faults: Annotated[
        ToolFaults, typer.Option(help="A trajectory in which a tool failed, which is not the teacher's fault.")
    ] = ToolFaults.keep,
    judge: Annotated[
        JudgedBy, typer.Option(help="Who judges; auto: rltr.judge where it is set, else the teacher.")
    ] = JudgedBy.auto,
    seed: Annotated[int, typer.Option(help="Draws between equal scores where --balance drops some.")] = 1,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS|auto|local", help="Judge on a Ray cluster; local starts one here.")
    ] = None,
    ray_workers: Annotated[int, typer.Option(min=1, help="Processes on Ray.")] = 2,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the node rltr, e.g. judge.n_votes=5"),
    ] = None,
) -> None:
    """Drop what is malformed, wrong or held out, have the judge score the rest, keep the best of each query.

    Verdicts are kept as they come: the same command goes on where a run has ended. Writes selected.jsonl, ledger.jsonl
    (every candidate and why it was kept or dropped), funnel.json and funnel.png into the folder. Ends with 0 if
    something is kept, 1 if nothing is, 2 if something has to be mended first, 130 after Ctrl-C.
    """
    from rich.console import Console

    from rltr_verl.coldstart.select import SelectOptions
    from rltr_verl.coldstart.select import select as run

    settings = read_settings(changes or [])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _progress(Console(stderr=True)) as notice:
            options = SelectOptions(
                keep=keep,
                min_score=min_score,
                held_out=tuple(held_out or []),
                near=near,
                balance=balance.value,
                balance_ratio=balance_ratio,
                seed=seed,
                tool_faults=tool_faults.value,
                judge=judge.value,
                ray=ray,
                ray_workers=ray_workers,
                notice=notice,
            )
            funnel = run(folder, settings, options)
    except KeyboardInterrupt:
        said = "Interrupted. What has been judged is kept; the same command goes on."
        typer.secho(said, fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(_INTERRUPTED) from None
    _report(funnel, folder)


@contextmanager
def _progress(console: Console) -> Iterator[Notice]:
    """A bar for each stage on a terminal: count, time left, cost of the judge; elsewhere a line every half minute."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    bar = BarColumn(bar_width=24), TaskProgressColumn(), TimeRemainingColumn(elapsed_when_finished=True)
    with Progress("{task.description}", *bar, "{task.fields[note]}", console=console) as progress:
        yield _Bars(progress)


class _Count:
    """How far a stage is: a share and, where candidates are counted and not bytes, their number and cost."""

    def __init__(self, stage: str, total: int) -> None:
        self.stage, self.total, self.done, self.cost = stage, total, 0, 0.0

    def add(self, done: int, cost: float) -> None:
        """Take note of more."""
        self.done, self.cost = self.done + done, self.cost + cost

    @property
    def note(self) -> str:
        """Number and cost."""
        if self.stage == _BYTES:
            return ""
        return f"{self.done:,}/{self.total:,}" + (f"  cost {self.cost:.4f}" if self.cost else "")


class _Shown:
    """Counts the stages; a subclass shows them."""

    def __init__(self) -> None:
        self._counts: dict[str, _Count] = {}

    def __call__(self, stage: str, done: int, total: int, cost: float) -> None:
        count = self._counts.setdefault(stage, _Count(stage, total))
        count.add(done, cost)
        self.show(count)

    def show(self, count: _Count) -> None:
        """Show how far a stage is."""


class _Bars(_Shown):
    """Bars of a :class:`rich.progress.Progress`."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def show(self, count: _Count) -> None:
        if count.stage not in self._tasks:
            self._tasks[count.stage] = self._progress.add_task(count.stage, total=count.total, note="")
        self._progress.update(self._tasks[count.stage], completed=count.done, note=count.note)


class _Lines(_Shown):
    """Prints a line when the last one is old enough."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console, self._next = console, time.monotonic() + _EVERY_S

    def show(self, count: _Count) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_S
            share = count.done / count.total if count.total else 1.0
            self._console.print(f"{count.stage} {share:.0%}  {count.note}", markup=False, highlight=False)


def _report(funnel: Funnel, folder: Path) -> None:
    from rich.console import Console

    console = Console()
    for table in funnel.tables():
        console.print(table)
        console.print()
    lost = ", ".join(f"{count} {reason}" for reason, count in funnel.lost.items()) or "none"
    typer.echo(f"Judged by {funnel.judge}.")
    typer.echo(f"Queries without a kept trajectory: {lost}.")
    typer.echo(f"{funnel.kept} of {funnel.stages[0].samples} trajectories are kept: {folder / 'selected.jsonl'}")
    if not funnel.kept:
        typer.secho("Nothing is kept; ledger.jsonl says why.", fg=typer.colors.RED, err=True)
        raise typer.Exit(_NOTHING_KEPT)
