"""How a command ends when something the user can mend is wrong: the message on stderr, exit status 2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import typer

from rltr_verl.errors import RltrError

R = TypeVar("R")


def reports_errors(command: Callable[..., R]) -> Callable[..., R]:
    """Turn an :class:`RltrError` of ``command`` into one clear message instead of a traceback."""

    @functools.wraps(command)
    def run(*args: object, **options: object) -> R:
        try:
            return command(*args, **options)
        except RltrError as error:
            typer.secho(f"{type(error).__name__}: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from None

    return run
