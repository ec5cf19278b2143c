"""How far sampling is: a bar on a terminal, a line every half minute elsewhere, a table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from rltr_verl.coldstart.recording import Summary
from rltr_verl.coldstart.records import Outcome, Usage

_EVERY_S = 30.0


@contextmanager
def shown(console: Console, every_s: float = _EVERY_S) -> Iterator[Callable[[Summary], None]]:
    """A function that shows the figures it gets on ``console``."""
    if not console.is_terminal:
        yield _Lines(console, every_s)
        return
    columns = TextColumn("sampling"), BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task("", total=None)

        def show(summary: Summary) -> None:
            through = summary.done + summary.failed
            progress.update(task, total=summary.total, completed=through, description=note(summary))

        yield show


class _Lines:
    """Prints a line when the last one is old enough."""

    def __init__(self, console: Console, every_s: float) -> None:
        self._console, self._every_s, self._next = console, every_s, time.monotonic() + every_s

    def __call__(self, summary: Summary) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            self._console.print(f"sampling {note(summary)}", markup=False, highlight=False, soft_wrap=True)


def note(summary: Summary) -> str:
    """Done of all, yield, failures, tokens and cost, time to go."""
    parts = [f"{summary.done:,}/{summary.total:,}"]
    if summary.yielded is not None:
        parts.append(f"kept {summary.yielded:.0%}")
    if summary.failed:
        parts.append(f"failed {summary.failed:,}")
    parts.append(_tokens(summary.usage))
    if summary.usage.cost:
        parts.append(f"cost {summary.usage.cost:.2f}")
    if summary.eta_s is not None:
        parts.append(f"ETA {_time(summary.eta_s)}")
    return "  ".join(parts)


def table(summary: Summary) -> Table:
    """The figures of a run that has ended."""
    found = Table(box=None, pad_edge=False, show_header=True)
    for name, justify in (("samples", "left"), ("all runs", "right"), ("this run", "right")):
        found.add_column(name, justify="right" if justify == "right" else "left")
    for outcome in Outcome:
        if outcome is not Outcome.FAILED:
            found.add_row(outcome.value, f"{summary.outcomes[outcome]:,}", "")
    found.add_row("left to do", f"{summary.left:,}", "")
    found.add_row("attempts", "", f"{summary.made:,}")
    found.add_row("failed", "", f"{summary.failed:,}")
    both = (summary.usage, summary.spent)
    found.add_row("prompt tokens", *(f"{usage.prompt_tokens:,}" for usage in both))
    found.add_row("completion tokens", *(f"{usage.completion_tokens:,}" for usage in both))
    if summary.usage.cost:
        found.add_row("cost", *(f"{usage.cost:.4f}" for usage in both))
    found.add_row("time", "", _time(summary.seconds))
    return found


def _tokens(usage: Usage) -> str:
    count = usage.prompt_tokens + usage.completion_tokens
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit} tokens"
    return f"{count} tokens"


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
