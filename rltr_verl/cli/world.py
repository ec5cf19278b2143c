"""``rltr world``: the offline world."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from rltr_verl.cli._errors import reports_errors

app = typer.Typer(no_args_is_help=True, help="The offline world: facts, queries, tools and a tiny planner.")


NEEDED_BYTES = 64 << 20
"""A world takes about 10 MiB; it is written beside its place and then renamed."""


@app.callback()
def _world() -> None:
    """Keep `build` a sub-command although it is the only one."""


@app.command("build")
@reports_errors
def build(
    out: Annotated[Path, typer.Option(help="Folder to make.")] = Path("outputs/world"),
    seed: Annotated[int, typer.Option(help="The same seed gives the same world.")] = 1,
    train: Annotated[int | None, typer.Option(min=1, help="Number of training queries.")] = None,
    coldstart: Annotated[int | None, typer.Option(min=1, help="Number of cold-start conversations.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a world that is there.")] = False,
) -> None:
    """Build the world of a seed: queries in verl's format, cold-start conversations, an untrained tiny model."""
    from rltr_verl.preflight import require_room
    from rltr_verl.world import WorldSizes, build_world

    require_room(out, "--out", NEEDED_BYTES)
    given = {"train": train, "coldstart": coldstart}
    sizes = replace(WorldSizes(), **{name: number for name, number in given.items() if number is not None})
    world = build_world(out, seed, sizes, overwrite=overwrite)
    typer.echo(
        f"{world.folder}: seed {world.seed}, {', '.join(f'{name} {n}' for name, n in asdict(world.sizes).items())}"
    )
