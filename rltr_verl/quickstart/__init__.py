"""The whole method on a laptop: a small world, a cold start, RL by stock verl, and the figures before and after.

    world -> coldstart -> gate -> before -> rl -> after -> report

Each stage writes into the run's folder and is recorded in ``state.json`` when it is done, so that a run that was
interrupted goes on where it was.
"""

from rltr_verl.quickstart.options import ALGOS, Options
from rltr_verl.quickstart.run import run_quickstart

__all__ = ["ALGOS", "Options", "run_quickstart"]
