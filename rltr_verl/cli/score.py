"""``rltr score``: score stored trajectories, without verl and without a GPU."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rltr_verl.cli._errors import reports_errors
from rltr_verl.cli._rows import FORM, StoredRow, read_stored_rows
from rltr_verl.cli._settings import read_settings
from rltr_verl.config import RltrSettings
from rltr_verl.scoring import ScoredTrajectory, Scorer

_WINDOW = 64
"""Trajectories scored at once; the judge's own limit bounds the requests."""


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

    All rows are checked before the first is scored. Completeness comes from the rows' needs, or from a judge:
    --set judge.backend=endpoint --set judge.base_url=http://host:8000/v1 --set judge.model=NAME
    """
    settings = read_settings(changes or [])
    loaded = list(read_stored_rows(rows, settings))
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
    scorer = Scorer(settings)
    unscored: list[tuple[Any, str]] = []
    try:
        for start in range(0, len(rows), _WINDOW):
            window = rows[start : start + _WINDOW]
            scored = await asyncio.gather(*(scorer.score(row.trajectory, row.data) for row in window))
            for row, result in zip(window, scored, strict=True):
                write(json.dumps(_line(row, result)))
                if result.unscored:
                    unscored.append((row.id, result.unscored))
            sys.stdout.flush()
    finally:
        await scorer.close()
    return unscored


def _line(row: StoredRow, scored: ScoredTrajectory) -> dict[str, Any]:
    completeness = scored.results.get("completeness")
    return {
        "id": row.id,
        "format_ok": not scored.faults,
        "format_reason": ", ".join(scored.faults) or None,
        "n_calls": row.trajectory.n_calls,
        "repeats": _count(scored, "repeats"),
        "errors": _count(scored, "errors"),
        "completeness": completeness.value if completeness else None,
        "votes": completeness.record["votes"] if completeness else [],
        "total": scored.total,
    }


def _count(scored: ScoredTrajectory, name: str) -> int | None:
    """A term's count, or None where the term is off."""
    return int(scored.metrics[name]) if name in scored.metrics else None
