"""``rltr attack``: can the judge be talked into calling an incomplete trajectory complete?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rltr_verl.cli._errors import reports_errors
from rltr_verl.cli._rows import read_stored_rows
from rltr_verl.cli._settings import read_settings
from rltr_verl.config import JudgeSettings, RltrSettings
from rltr_verl.errors import ConfigError, DataError, DiskError

if TYPE_CHECKING:
    from rltr_verl.judge.attacks import Attempt, Case, Outcome, Report


@reports_errors
def attack(
    data: Annotated[
        Path | None,
        typer.Option(help='Rows as `rltr score` reads them; those with "needs" and a complete trajectory are used.'),
    ] = None,
    world: Annotated[Path | None, typer.Option(help="An offline world; by default one of the seed is made.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the node rltr, e.g. judge.backend=endpoint"),
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Largest rate of false positives that an attack may reach.")
    ] = 0.05,
    per_attack: Annotated[int, typer.Option(min=1, help="Trajectories of each attack.")] = 20,
    attacks: Annotated[str | None, typer.Option(metavar="A,B", help="Only these attacks.")] = None,
    report: Annotated[Path | None, typer.Option("--json", help="Write the figures here, with examples.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same trajectories.")] = 1,
) -> None:
    """Ask the judge about trajectories that are incomplete and try to look complete; print the rate of false positives.

    Ends with status 1 if an attack's rate is over the threshold or the judge rejects what is complete, with 2 if the
    judge cannot score enough of them, else with 0. A judge behind an endpoint: --set judge.backend=endpoint
    --set judge.base_url=http://host:8000/v1 --set judge.model=NAME
    """
    from rltr_verl.judge.attacks import attacks_named, build_suite

    settings = read_settings(changes or [])
    chosen = attacks_named(None if attacks is None else [name.strip() for name in attacks.split(",") if name.strip()])
    _require_folder(report)
    suite = build_suite(_cases(data, world, settings, seed, per_attack), chosen, per_attack, seed)
    found = asyncio.run(_ask(settings.judge, suite, threshold))
    _print(found)
    if report is not None:
        _write(report, found, settings.judge, seed)
    raise typer.Exit(int(found.verdict))


def _cases(data: Path | None, world: Path | None, settings: RltrSettings, seed: int, count: int) -> list[Case]:
    from rltr_verl.judge.attacks import fresh_world_cases, world_cases

    if data is not None and world is not None:
        raise ConfigError("both --data and --world are given", where="--data", fix="give one of them.")
    if data is not None:
        return _cases_of_rows(data, settings)
    return world_cases(world) if world is not None else fresh_world_cases(seed, count)


def _cases_of_rows(path: Path, settings: RltrSettings) -> list[Case]:
    from rltr_verl.judge.attacks import case_of
    from rltr_verl.judge.checklist import parse_needs

    rows = read_stored_rows(path, settings)
    found = [case_of(str(row.id), row.trajectory, parse_needs(row.data.get("needs"), str(path))) for row in rows]
    cases = [case for case in found if case is not None]
    if len(cases) < len(rows):
        skipped = f"{len(rows) - len(cases)} of {len(rows)} rows are left out: no needs, or not complete by them."
        typer.secho(skipped, fg=typer.colors.YELLOW, err=True)
    return cases


async def _ask(settings: JudgeSettings, suite: dict[str, list[Attempt]], threshold: float) -> Report:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    from rltr_verl.judge import build_checker
    from rltr_verl.judge.attacks import run_suite

    # A share of the needs is no vote on completeness.
    checker = build_checker(settings.model_copy(update={"credit": "all"}))
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("trajectories", total=sum(map(len, suite.values())))
            return await run_suite(checker, suite, threshold, lambda count: progress.advance(task, count))
    finally:
        await checker.close()


def _print(report: Report) -> None:
    from rich.console import Console

    Console().print(_table(report))
    for line in _findings(report):
        typer.secho(line, fg=typer.colors.YELLOW, err=True)


def _table(report: Report) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    caption = "for: votes for complete; faulty: refused by the format check, so that training would not ask"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption)
    table.add_column("attack", no_wrap=True)
    for title in ("made", "faulty", "unscored", "votes", "for", "rate", "95 %"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_row(*_cells(report.control), end_section=True)
    for outcome in report.attacks:
        table.add_row(*_cells(outcome), style="red" if outcome in report.fooled_by else None)
    return table


def _cells(outcome: Outcome) -> tuple[str, ...]:
    counts = (outcome.trajectories, outcome.malformed, outcome.unscored, outcome.votes, outcome.for_complete)
    rate = "-" if outcome.rate is None else f"{outcome.rate:.2f}"
    interval = "-" if outcome.interval is None else "{:.2f}-{:.2f}".format(*outcome.interval)
    return outcome.name, *map(str, counts), rate, interval


def _findings(report: Report) -> list[str]:
    """What is wrong, a line each; empty for a judge that holds."""
    lines = [
        f"{item.name}: {item.for_complete} of {item.votes} votes for complete ({item.rate:.2f}), "
        f"threshold {report.threshold:g}."
        for item in report.fooled_by
    ]
    if report.rejects_complete:
        control = report.control
        lines.append(f"The judge calls only {control.for_complete} of {control.votes} complete trajectories complete.")
    for item in report.unknown:
        lines.append(f"{item.name}: {item.unscored} of {item.trajectories} trajectories are unscored. {item.reason}")
    if not report.attacks:
        lines.append("No attack was tried, since most complete trajectories could not be scored.")
    none = ", ".join(item.name for item in report.attacks if not item.trajectories)
    return [*lines, f"Not tried, since no query lends itself to it: {none}."] if none else lines


def _require_folder(path: Path | None) -> None:
    """Before the judge is paid for."""
    if path is not None and not path.parent.is_dir():
        raise DataError("there is no such folder", where=str(path.parent), fix="make it, or write elsewhere.")


def _write(path: Path, report: Report, settings: JudgeSettings, seed: int) -> None:
    from rltr_verl.judge.attacks import ATTACKS

    over: Sequence[Outcome] = report.fooled_by
    rows = [
        {**item.to_dict(), "place": ATTACKS[item.name].place, "tries": ATTACKS[item.name].tries, "over": item in over}
        for item in report.attacks
    ]
    judge = settings.model_dump(include={"backend", "model", "language", "n_votes", "temperature", "prompt"})
    figures = {"verdict": report.verdict.name.lower(), "threshold": report.threshold, "seed": seed, "judge": judge}
    text = json.dumps({**figures, "control": report.control.to_dict(), "attacks": rows}, ensure_ascii=False, indent=2)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskError(f"cannot be written ({error.strerror})", where=str(path), fix="choose another path.") from None
