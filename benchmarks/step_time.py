"""Where the time of a training step goes: seconds of each phase, and CPU seconds of each process.

    python benchmarks/step_time.py --world FOLDER [--model FOLDER] [--steps 12] [--stock] [--json FILE] [override ...]

Runs stock ``main_ppo`` with the recipe ``rltr_planner scale=cpu algo=grpo`` on an offline world (``rltr world build``)
and a model folder, best a cold-started one: an untrained model writes no calls. Figures are medians over the steps from
the third on; CPU seconds are per step, over the same steps.

``--stock`` afterwards runs the same job, on the same engines, with verl's own agent loop ``tool_agent``, replay buffer
and ``naive`` reward manager (which gives 0), and prints the ratio. That loop keeps no stop marker, shows the tools'
answers in full and parses with verl's hermes parser, so trajectories differ in length; see the column of tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
from rich.console import Console
from rich.table import Table

FIRST = 3
PHASES = ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "step")
STOCK_TOOLS = '''"""The world's tools for verl's own loop."""

from rltr_verl.tools import calculator, days_between, search as ours
from verl.tools.function_tool import function_tool

function_tool("calculator")(calculator.calculator)
function_tool("days_between")(days_between.days_between)


@function_tool("search")
def search(query: str) -> str:
    """Search the facts.

    Args:
        query: what to look for.
    """
    return ours.search(query, corpus={corpus!r})
'''


@dataclass
class Run:
    """Figures of one job: ``phases`` and ``cpu`` in seconds a step, ``tokens`` of a response, ``difference`` between
    the probabilities of the rollout and the trainer (largest of all tokens)."""

    phases: dict[str, float]
    cpu: dict[str, float] = field(default_factory=dict)
    tokens: float = 0.0
    difference: float = 0.0


def main() -> None:
    args, overrides = _arguments()
    with tempfile.TemporaryDirectory(prefix="rltr") as folder:
        runs = {"rltr_planner": measure(args, overrides, Path(folder) / "ours")}
        if args.stock:
            peer = Path(folder) / "stock"
            runs["stock"] = measure(args, [*overrides, *stock_overrides(args.world, peer)], peer)
    report(runs)
    if args.json:
        args.json.write_text(json.dumps({name: vars(run) for name, run in runs.items()}, indent=2))


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=Path, required=True, help="folder that `rltr world build` wrote")
    parser.add_argument("--model", type=Path, help="model folder; the world's untrained one if not given")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--stock", action="store_true", help="also run verl's own loop and replay buffer")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args, overrides = parser.parse_known_args()
    if args.steps <= FIRST:
        parser.error(f"--steps must be above {FIRST}")
    return args, overrides


def measure(args: argparse.Namespace, overrides: list[str], folder: Path) -> Run:
    """Run one job; raises SystemExit with the end of its log if it fails."""
    folder.mkdir(exist_ok=True)
    metrics = folder / "metrics.jsonl"
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command(args, folder, overrides),
            env={**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics)},
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        cpu = watch(process, metrics, args.steps)
    if process.returncode:
        sys.exit(f"main_ppo failed:\n{(folder / 'log').read_text()[-4000:]}")
    rows = [json.loads(line)["data"] for line in metrics.read_text().splitlines()][FIRST - 1 :]

    def median(key: str) -> float:
        return statistics.median(row.get(key, 0.0) for row in rows)

    phases = {name: median(f"timing_s/{name}") for name in PHASES}
    difference = max(row["training/rollout_probs_diff_max"] for row in rows)
    return Run(phases, cpu, median("response_length/mean"), difference)


def command(args: argparse.Namespace, folder: Path, overrides: list[str]) -> list[str]:
    """The job as a user would type it."""
    model = args.model or args.world / "model"
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "rltr_planner", "scale=cpu", "algo=grpo"),
        f"rltr.world={args.world.resolve()}",
        f"actor_rollout_ref.model.path={model.resolve()}",
        f"trainer.total_training_steps={args.steps}",
        f"trainer.default_local_dir={folder / 'checkpoints'}",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
        f"+ray_kwargs.ray_init._temp_dir={folder / 'ray'}",
        "+ray_kwargs.ray_init.address=local",
        *overrides,
    ]


def stock_overrides(world: Path, folder: Path) -> list[str]:
    """verl's own loop, replay buffer and reward manager on the same queries."""
    folder.mkdir(exist_ok=True)
    rows = pd.read_parquet(world / "train.parquet").assign(agent_name="tool_agent")
    rows.to_parquet(folder / "train.parquet")
    (folder / "tools.py").write_text(STOCK_TOOLS.format(corpus=str((world / "facts.jsonl").resolve())))
    (folder / "reward.py").write_text("def compute_score(**_):\n    return 0.0\n")
    turns = "actor_rollout_ref.rollout.multi_turn"
    return [
        f"data.train_files={folder / 'train.parquet'}",
        f"{turns}.function_tool_path={folder / 'tools.py'}",
        f"{turns}.format=hermes",
        f"{turns}.max_assistant_turns=6",
        "rltr.preflight=false",  # it is for jobs of this package: verl's loop leaves no trajectory to score
        "reward.reward_manager.name=naive",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "trainer.v1.sampler.custom_sampler.path=null",
        "trainer.v1.sampler.custom_sampler.name=null",
    ]


def watch(process: subprocess.Popen[bytes], metrics: Path, last: int) -> dict[str, float]:
    """CPU seconds a step of every process of the job, from the step before the third to the last but one."""
    begin: tuple[int, dict[tuple[int, str], float]] | None = None
    end = begin
    while process.poll() is None:
        time.sleep(0.2)
        step = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        if begin is None and step >= FIRST - 1:
            begin = step, cpu_times(process.pid)
        elif begin and begin[0] < step < last and (end is None or end[0] < step):
            end = step, cpu_times(process.pid)
    if begin is None or end is None:
        return {}
    return per_step(begin[1], end[1], end[0] - begin[0])


def cpu_times(pid: int) -> dict[tuple[int, str], float]:
    """User and system seconds so far of ``pid`` and all below it, by process id and name."""
    times = {}
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        try:
            used = process.cpu_times()
            times[process.pid, _name(process.cmdline())] = used.user + used.system
        except psutil.NoSuchProcess:
            continue
    return times


def _name(arguments: list[str]) -> str:
    head = arguments[0] if arguments else "?"
    return head.removeprefix("ray::").split(".")[0] if head.startswith("ray::") else Path(head).name


def per_step(begin: Mapping[tuple[int, str], float], end: Mapping[tuple[int, str], float], n: int) -> dict[str, float]:
    """Seconds a step by name, the largest first; names below 10 ms are one entry."""
    used: dict[str, float] = defaultdict(float)
    for (pid, name), seconds in end.items():
        used[name] += (seconds - begin.get((pid, name), seconds)) / n
    shown = {name: seconds for name, seconds in sorted(used.items(), key=lambda item: -item[1]) if seconds >= 0.01}
    return {**shown, "others": sum(used.values()) - sum(shown.values())}


def report(runs: Mapping[str, Run]) -> None:
    """Print both tables."""
    console = Console(width=100)
    console.print(_table("seconds a step (median)", {name: run.phases for name, run in runs.items()}))
    console.print(
        _table("CPU seconds a step", {name: {**run.cpu, "all": sum(run.cpu.values())} for name, run in runs.items()})
    )
    for name, run in runs.items():
        console.print(f"{name}: {run.tokens:.1f} response tokens, rollout and trainer differ by {run.difference:.1e}")
    if "stock" in runs:
        ratio = runs["stock"].phases["step"] / runs["rltr_planner"].phases["step"]
        console.print(f"step, stock / rltr_planner: {ratio:.2f}x")


def _table(title: str, columns: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("", *columns, title=title)
    for key in dict.fromkeys(key for column in columns.values() for key in column):
        values = (column.get(key) for column in columns.values())
        table.add_row(key, *("-" if value is None else f"{value:.3f}" for value in values))
    return table


if __name__ == "__main__":
    main()
