"""``rltr score``: score stored trajectories, without verl and without a GPU."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rltr_verl.cli._errors import reports_errors
from rltr_verl.cli._rows import FORM, StoredRow, read_stored_rows
from rltr_verl.cli._settings import read_settings
from rltr_verl.config import RltrSettings
from rltr_verl.dump import TrajectoryDump
from rltr_verl.scoring import ScoredTrajectory, Scorer

_WINDOW = 64
"""Trajectories scored at once; the judge's own limit bounds the requests."""

_OF_THE_ROW = ("uid", "session_id", "global_steps", "data_source", "index", "split", "kind", "lang", "needs")
"""What a record of a dump repeats of the row."""


@reports_errors
def score(
    rows: Annotated[Path, typer.Argument(help="JSON lines: " + FORM + ' and, for the checklist, "needs"; or a dump.')],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the node rltr, e.g. reward.terms.repeat.lambda=0.3"
        ),
    ] = None,
) -> None:
    """Print one JSON line per stored trajectory: format, repeats, errors, completeness, votes, total (null = unscored).

    `terms` are the reward terms as they stand in the total, `reasons` the judge's words for its votes, if it gave any.
    --set dump_dir=FOLDER also writes the records that training would, with the whole trajectory.

    All rows are checked before the first is scored. Completeness comes from the rows' needs, or from a judge:
    --set judge.backend=endpoint --set judge.base_url=http://host:8000/v1 --set judge.model=NAME
    """
    settings = read_settings(changes or [])
    loaded = read_stored_rows(rows, settings)
    unscored = asyncio.run(_score_all(loaded, settings, typer.echo))
    if unscored:
        row, reason = unscored[0]
        count = f"{len(unscored)} of {len(loaded)} rows are unscored (total null)"
        typer.secho(f"{count}. The first, id {row!r}: {reason}", fg=typer.colors.YELLOW, err=True)


async def _score_all(
    rows: list[StoredRow], settings: RltrSettings, write: Callable[[str], Any]
) -> list[tuple[Any, str]]:
    """Score in the order of the rows, a window at a time; each window is written before the next starts.

    Returns:
        Id and reason of each unscored row.
    """
    scorer, bar = Scorer(settings), _Bar(len(rows))
    dump = TrajectoryDump(settings.dump_dir) if settings.dump_dir else None
    unscored: list[tuple[Any, str]] = []
    try:
        for start in range(0, len(rows), _WINDOW):
            window = rows[start : start + _WINDOW]
            with bar:
                scored = await asyncio.gather(*(bar.advance_after(_score(scorer, row)) for row in window))
            for row, result in zip(window, scored, strict=True):
                write(json.dumps(_line(row, result)))
                if dump:
                    dump.write(_record(row, result))
                if result.unscored:
                    unscored.append((row.id, result.unscored))
            sys.stdout.flush()
    finally:
        await scorer.close()
        if dump:
            dump.close()
    return unscored


def _score(scorer: Scorer, row: StoredRow) -> Awaitable[ScoredTrajectory]:
    return scorer.score(row.trajectory, row.data)


class _Bar:
    """A bar on stderr, if that is a terminal, while it is entered; gone while lines are written."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress

        console = Console(stderr=True)
        self._bar = Progress(
            *(*Progress.get_default_columns(), MofNCompleteColumn()),
            console=console,
            transient=True,
            redirect_stdout=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("scoring", total=total)

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    async def advance_after(self, work: Awaitable[ScoredTrajectory]) -> ScoredTrajectory:
        """What ``work`` gives; counted."""
        result = await work
        self._bar.advance(self._task)
        return result


def _line(row: StoredRow, scored: ScoredTrajectory) -> dict[str, Any]:
    completeness = scored.results.get("completeness")
    line = {
        "id": row.id,
        "format_ok": not scored.faults,
        "format_reason": ", ".join(scored.faults) or None,
        "n_calls": row.trajectory.n_calls,
        "repeats": _count(scored, "repeats"),
        "errors": _count(scored, "errors"),
        "completeness": completeness.value if completeness else None,
        "votes": completeness.record["votes"] if completeness else [],
        "total": scored.total,
        "terms": {name: scored.metrics[name] for name in scored.results},
    }
    reasons = [vote.get("reason") for vote in completeness.record.get("judge_votes", [])] if completeness else []
    return line | ({"reasons": reasons} if any(reasons) else {})


def _record(row: StoredRow, scored: ScoredTrajectory) -> dict[str, Any]:
    """What training writes into a dump, as far as a stored row knows it: no ids of tokens, and its own id."""
    known = {key: row.data.get(key) for key in _OF_THE_ROW}
    return {"id": row.id, **known, **scored.record(), "trajectory": row.trajectory.to_dict()}


def _count(scored: ScoredTrajectory, name: str) -> int | None:
    """A term's count, or None where the term is off."""
    return int(scored.metrics[name]) if name in scored.metrics else None
