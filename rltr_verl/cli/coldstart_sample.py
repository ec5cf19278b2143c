"""``rltr coldstart sample``: trajectories of a teacher."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rltr_verl.cli._errors import reports_errors

if TYPE_CHECKING:
    from rltr_verl.coldstart.recording import Summary
    from rltr_verl.coldstart.sampling import SampleOptions
    from rltr_verl.config import RltrSettings

_INTERRUPTED, _INCOMPLETE = 130, 1


@reports_errors
def sample(
    queries: Annotated[
        Path, typer.Argument(help="Queries as for `rltr data` (.jsonl, .csv, .parquet), or what it has made.")
    ],
    folder: Annotated[Path, typer.Option("--dir", help="Folder of the cold start.")],
    model: Annotated[str, typer.Option(help="Folder or hub name of the model that is to learn (its tokenizer).")],
    n: Annotated[int, typer.Option("-n", "--samples", min=1, help="Samples of each query; may grow later.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the run; every sample has a seed of its own.")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse the file if a row cannot be used.")] = False,
    ignore: Annotated[list[str] | None, typer.Option(metavar="FIELD", help="Leave a field of the file out.")] = None,
    max_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Longest prompt, tools included (data.max_prompt_length).")
    ] = 4096,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS|auto|local", help="Play on a Ray cluster; local starts one here.")
    ] = None,
    ray_workers: Annotated[int, typer.Option(min=1, help="Processes on Ray.")] = 2,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the node rltr, e.g. teacher.model=NAME"),
    ] = None,
) -> None:
    """Let a teacher play each query n times with the planner's own prompts, tools and parser.

    Every finished sample is appended to samples.jsonl at once. The same command goes on where a run has ended, however
    it ended; samples that failed are then tried again. Ends with 0 if every sample is there, 1 if some are not, 2 if
    something has to be mended first, 130 after Ctrl-C.
    """
    from rltr_verl.cli._settings import read_settings
    from rltr_verl.coldstart.queries import QueryOptions
    from rltr_verl.coldstart.sampling import SampleOptions

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows = QueryOptions(strict, max_prompt_tokens, frozenset(ignore or []))
    options = SampleOptions(n, seed, rows, ray, ray_workers)
    try:
        summary = _run(folder, queries, read_settings(changes or []), model, options)
    except KeyboardInterrupt:
        typer.secho("interrupted", fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(_INTERRUPTED) from None
    _report(summary, folder)
    if summary.interrupted:
        raise typer.Exit(_INTERRUPTED)
    if summary.left:
        raise typer.Exit(_INCOMPLETE)


def _run(folder: Path, queries: Path, settings: RltrSettings, model: str, options: SampleOptions) -> Summary:
    from rich.console import Console

    from rltr_verl.coldstart.progress import shown
    from rltr_verl.coldstart.sampling import sample as sample_all

    with shown(Console(stderr=True)) as watch:
        return sample_all(folder, queries, settings, model, options, watch=watch)


def _report(summary: Summary, folder: Path) -> None:
    from rich.console import Console

    from rltr_verl.coldstart.progress import table
    from rltr_verl.coldstart.store import Folder

    Console().print(table(summary))
    home = Folder(folder)
    repeated = f", {summary.repeated} repeated ones dropped" if summary.repeated else ""
    typer.echo(f"{summary.queries} queries{repeated}. Samples: {home.samples}")
    if summary.skipped:
        _warn(f"{summary.skipped} rows cannot be used; {home.skipped} says why.")
    for reason, count in summary.reasons.most_common(3):
        _warn(f"failed {count} times: {reason}")
    if summary.left:
        how = "interrupted" if summary.interrupted else "incomplete"
        _warn(f"{how}: {summary.done} of {summary.total} samples are done, {summary.left} are left. To go on:")
        _warn(f"  {shlex.join(['rltr', *sys.argv[1:]])}")


def _warn(text: str) -> None:
    typer.secho(text, fg=typer.colors.YELLOW, err=True)
