"""``rltr quickstart``: see the method work on this machine."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from rltr_verl.cli._errors import reports_errors


class Algo(str, Enum):
    """RL algorithms."""

    grpo = "grpo"
    ppo = "ppo"
    reinforce_pp = "reinforce_pp"


@reports_errors
def quickstart(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value overrides for verl's main_ppo, e.g. kl=off.")
    ] = None,
    algo: Annotated[Algo, typer.Option(help="RL algorithm; `algo=ppo` as an override does the same.")] = Algo.grpo,
    seed: Annotated[int, typer.Option(help="Of the world, the model, the data order and the sampling.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("outputs/quickstart"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove an earlier run in the folder first.")] = False,
    steps: Annotated[int, typer.Option(help="RL steps.")] = 50,
    sft_steps: Annotated[int, typer.Option(help="Cold-start steps.")] = 700,
) -> None:
    """World, cold start, RL by stock verl, figures before and after: about 4 minutes on 2 idle cores without a GPU.

    Interrupted (Ctrl-C), it goes on where it was when run again.
    """
    from rltr_verl.quickstart import Options, run_quickstart
    from rltr_verl.quickstart.run import resume_command

    chosen, rest = _split_algo(algo.value, overrides or [])
    options = Options(out=out, algo=chosen, seed=seed, rl_steps=steps, sft_steps=sft_steps, overrides=tuple(rest))
    try:
        run_quickstart(options, fresh=fresh)
    except KeyboardInterrupt:
        typer.secho(f"\nInterrupted; what is done is kept. Go on with:  {resume_command(options)}", err=True)
        raise typer.Exit(130) from None


def _split_algo(algo: str, overrides: list[str]) -> tuple[str, list[str]]:
    """Take ``algo=...`` out of the overrides."""
    given = [word.partition("=")[2] for word in overrides if word.startswith("algo=")]
    return (given[-1] if given else algo), [word for word in overrides if not word.startswith("algo=")]
