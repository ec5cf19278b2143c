"""The command ``rltr``. Every command lives in a module of its own and is added here by one line."""

from __future__ import annotations

from typing import Annotated

import typer

from rltr_verl import __version__
from rltr_verl.cli import coldstart, world
from rltr_verl.cli.attack import attack
from rltr_verl.cli.data import data
from rltr_verl.cli.merge import merge
from rltr_verl.cli.quickstart import quickstart
from rltr_verl.cli.score import score
from rltr_verl.cli.search_index import search_index
from rltr_verl.cli.settings import settings
from rltr_verl.cli.test_tool import test_tool
from rltr_verl.cli.verify_masks import verify_masks

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rltr_verl {__version__}")
        raise typer.Exit


@app.callback()
def _rltr(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Reinforcement learning of LLM agents on data without ground truth, on verl."""


app.command("score")(score)
app.command("attack")(attack)
app.command("data")(data)
app.command("search-index")(search_index)
app.command("test-tool")(test_tool)
app.command("verify-masks")(verify_masks)
app.command("settings")(settings)
app.command("quickstart")(quickstart)
app.command("merge")(merge)
app.add_typer(coldstart.app, name="coldstart")
app.add_typer(world.app, name="world")
