"""``rltr coldstart``: from queries to what verl's SFT trainer learns from."""

from __future__ import annotations

import typer

from rltr_verl.cli.coldstart_export import export
from rltr_verl.cli.coldstart_sample import sample
from rltr_verl.cli.coldstart_select import select

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _coldstart() -> None:
    """Cold start of a planner: a teacher plays queries, a judge picks the best, verl's SFT trainer learns from them."""


app.command("sample")(sample)
app.command("select")(select)
app.command("export")(export)
