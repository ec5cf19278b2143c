"""The stages of a run, in order. A stage may be begun again at any time; a finished one never is."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape

from rltr_verl.checkpoints import newest_step
from rltr_verl.config import RltrSettings
from rltr_verl.quickstart import gate as gates
from rltr_verl.quickstart.commands import rl_command, sft_command, world_command
from rltr_verl.quickstart.curves import TrajectoryFigures, read_curves
from rltr_verl.quickstart.evaluation import evaluate, read_rows, summarize, write_trajectories
from rltr_verl.quickstart.options import Options, Paths
from rltr_verl.quickstart.process import Command, run_logged
from rltr_verl.quickstart.progress import MetricsTail, StageBar, progress_bar, rl_note, sft_note
from rltr_verl.quickstart.report import write_report
from rltr_verl.quickstart.state import RunState
from rltr_verl.rollout.local import LocalModel, LocalSampling
from rltr_verl.scoring import Scorer
from rltr_verl.world import World, build_world, load_world

EVALUATED = ("val", "val_unseen")
"""Splits on which a model is measured, greedily."""

_SHORT = "/tmp" if Path("/tmp").is_dir() else None
"""Ray puts sockets into its folder, whose paths may not be longer than 107 bytes."""


@dataclass(frozen=True)
class Stage:
    """A stage: its name in ``state.json``, a title, and what it does."""

    name: str
    title: str
    work: Callable[[Run], Mapping[str, Any]]


@dataclass
class Run:
    """What the stages share."""

    options: Options
    paths: Paths
    state: RunState
    console: Console
    config: DictConfig
    settings: RltrSettings
    scorer: Scorer = field(init=False)

    def __post_init__(self) -> None:
        self.scorer = Scorer(self.settings)

    def stage(self, stage: Stage, number: int, total: int) -> None:
        """Do a stage unless it is done."""
        head = f"[bold]{number}/{total} {stage.title}[/bold]"
        if self.state.is_done(stage.name):
            self.console.print(f"{head}  [dim]done before[/dim]")
            return
        self.console.print(head)
        with self.state.running(stage.name):
            result = stage.work(self)
        self.state.finish(stage.name, result)

    def show(self, command: Command) -> None:
        """Print a command so that it can be copied."""
        self.console.print(f"[cyan]$ {escape(command.text())}[/cyan]", soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line of a stage."""
        self.console.print(f"  {escape(text)}", soft_wrap=True, highlight=False)

    def next_file(self, stage: str, suffix: str) -> Path:
        """A new file under ``metrics/`` for this attempt: verl overwrites the file it is given."""
        self.paths.metrics.mkdir(parents=True, exist_ok=True)
        number = len(list(self.paths.metrics.glob(f"{stage}-*{suffix}"))) + 1
        return self.paths.metrics / f"{stage}-{number:03d}{suffix}"

    def files(self, folder: Path, stage: str) -> list[Path]:
        """Files or folders of all attempts at a stage, oldest first."""
        return sorted(folder.glob(f"{stage}-*"))

    def model(self, folder: Path) -> LocalModel:
        """A model of this run, ready to roll out."""
        return LocalModel(folder, self.settings)

    def sampling(self, temperature: float) -> LocalSampling:
        """Sampling as in training, but for the temperature."""
        length = int(self.config.data.max_response_length)
        return LocalSampling(temperature=temperature, seed=self.options.seed, max_tokens=length)


def build(run: Run) -> dict[str, Any]:
    """Build the world of the seed."""
    run.show(world_command(run.options, run.paths))
    with run.console.status("  facts, queries, teacher, tokenizer, model"):
        world = build_world(run.paths.world, run.options.seed, run.options.sizes)
    counts = {split: len(read_rows(world.split(split))) for split in ("train", *EVALUATED)}
    run.say(", ".join(f"{count} {split} queries" for split, count in counts.items()))
    return counts


def coldstart(run: Run) -> dict[str, Any]:
    """Teach the untrained model the format and the tools."""
    return _train_sft(run, run.options.sft_steps)


def gate(run: Run) -> dict[str, Any]:
    """Measure the cold start; train it further if it is short, at most ``attempts`` times."""
    limits, world = run.options.gate, _world(run)
    rows = read_rows(world.split("val"))
    for extra in range(int(run.state.notes("gate").get("extra", 0)), limits.attempts + 1):
        run.state.note("gate", extra=extra)
        steps = run.options.sft_steps + extra * limits.more_steps
        trained = _train_sft(run, steps)
        model = run.model(run.paths.root / trained["model"])
        with progress_bar(run.console, "gate", gates.SAMPLES * len(rows)) as bar:
            figures = gates.measure(model, run.scorer, world.coldstart, rows, run.sampling(1.0), bar.advance)
        run.say(f"{figures.n_prompts} prompts of SFT and rollout are equal token by token; {figures.text(limits)}")
        if figures.passes(limits):
            return {**trained, **figures.to_dict()}
        if extra < limits.attempts:
            run.say(f"not there yet: {limits.more_steps} more steps")
    raise gates.refusal(figures, limits, steps, run.paths.logs / "coldstart.log")


def before(run: Run) -> dict[str, Any]:
    """Measure the cold start on the fixed queries."""
    return _evaluate(run, "before", run.paths.root / run.state.result("gate")["model"])


def rl(run: Run) -> dict[str, Any]:
    """RL by stock verl."""
    steps = int(run.config.trainer.total_training_steps)
    found = newest_step(run.paths.rl)
    if found is None or found[0] < steps:
        ray_dir = Path(tempfile.mkdtemp(prefix="rltr-ray-", dir=_SHORT))
        try:
            _train_rl(run, steps, ray_dir)
        finally:
            shutil.rmtree(ray_dir, ignore_errors=True)
    step, folder = newest_step(run.paths.rl) or (0, run.paths.rl)
    return {"steps": step, "model": str((folder / "actor" / "huggingface").relative_to(run.paths.root))}


def after(run: Run) -> dict[str, Any]:
    """Measure the trained planner on the same queries."""
    return _evaluate(run, "after", run.paths.root / run.state.result("rl")["model"])


def report(run: Run) -> dict[str, Any]:
    """Write the summary, the curves and the page, and show the figures."""
    curves = read_curves(run.files(run.paths.trajectories, "rl"), run.files(run.paths.metrics, "rl"))
    return write_report(run.options, run.paths, run.state, curves, run.console)


STAGES = (
    Stage("world", "World", build),
    Stage("coldstart", "Cold start: verl's SFT trainer", coldstart),
    Stage("gate", "Gate: is the cold start ready for RL?", gate),
    Stage("before", "Evaluation before RL", before),
    Stage("rl", "RL: stock verl main_ppo", rl),
    Stage("after", "Evaluation after RL", after),
    Stage("report", "Report", report),
)


def _world(run: Run) -> World:
    return load_world(run.paths.world)


def _train_sft(run: Run, steps: int) -> dict[str, Any]:
    """Train up to ``steps`` steps in all, from the newest checkpoint there is."""
    found = newest_step(run.paths.coldstart)
    if found is None or found[0] < steps:
        metrics = run.next_file("coldstart", ".jsonl")
        command = sft_command(run.options, run.paths, steps, metrics)
        run.show(command)
        _watched(run, command, "coldstart", steps, _follow(MetricsTail(metrics), sft_note))
        found = newest_step(run.paths.coldstart)
    step, folder = found or (0, run.paths.coldstart)
    return {"steps": step, "model": str((folder / "huggingface").relative_to(run.paths.root))}


def _train_rl(run: Run, steps: int, ray_dir: Path) -> None:
    metrics = run.next_file("rl", ".jsonl")
    trajectories = run.paths.trajectories / metrics.stem
    start = run.paths.root / run.state.result("gate")["model"]
    command = rl_command(run.options, run.paths, start, metrics, trajectories, ray_dir)
    run.show(command)
    figures = TrajectoryFigures(trajectories)

    def note(step: int, values: Mapping[str, float]) -> str:
        return rl_note({**values, **figures.read().get(step, {})})

    _watched(run, command, "rl", steps, _follow(MetricsTail(metrics), note))


def _watched(run: Run, command: Command, stage: str, steps: int, follow: Callable[[StageBar], None]) -> None:
    with progress_bar(run.console, stage, steps) as bar:
        run_logged(command, run.paths.logs / f"{stage}.log", lambda: follow(bar))


def _follow(tail: MetricsTail, note: Callable[[int, Mapping[str, float]], str]) -> Callable[[StageBar], None]:
    """Move a bar along with verl's metrics file."""

    def follow(bar: StageBar) -> None:
        new = tail.new()
        if new:
            step, values = new[-1]
            bar.to(step, note(step, values))

    return follow


def _evaluate(run: Run, when: str, model_folder: Path) -> dict[str, Any]:
    model, world = run.model(model_folder), _world(run)
    found = {}
    for split in EVALUATED:
        rows = read_rows(world.split(split))
        with progress_bar(run.console, split, len(rows)) as bar:
            evaluated = evaluate(model, run.scorer, rows, run.sampling(0.0), bar.advance)
        write_trajectories(run.paths.evaluation / f"{when}_{split}.jsonl", evaluated)
        found[split] = summarize(evaluated)
        run.say(f"{split}: completeness {found[split]['completeness']:.3f}, {found[split]['calls']:.2f} calls a query")
    return found
