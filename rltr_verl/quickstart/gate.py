"""Is a cold start good enough for RL? Judged by what it does, not by its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rltr_verl.errors import GateError
from rltr_verl.quickstart.evaluation import Evaluated, evaluate
from rltr_verl.quickstart.options import GateLimits
from rltr_verl.rollout.local import LocalModel, LocalSampling
from rltr_verl.scoring import Scorer

SAMPLES = 2
"""Trajectories per query."""


@dataclass(frozen=True)
class GateFigures:
    """What was measured: shares of sampled trajectories, and the number of prompts found equal."""

    format_ok: float
    multi_call: float
    n_prompts: int

    def passes(self, limits: GateLimits) -> bool:
        """Whether RL can start."""
        return self.format_ok >= limits.format_ok and self.multi_call >= limits.multi_call

    def text(self, limits: GateLimits) -> str:
        """One line for people."""
        return (
            f"well-formed {self.format_ok:.2f} (needed {limits.format_ok:.2f}), "
            f"complete on multi-call queries {self.multi_call:.2f} (needed {limits.multi_call:.2f})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def measure(
    model: LocalModel,
    scorer: Scorer,
    coldstart: Path,
    rows: Sequence[Mapping[str, Any]],
    sampling: LocalSampling,
    on_done: Callable[[], None] | None = None,
) -> GateFigures:
    """Compare the prompts and sample every query :data:`SAMPLES` times.

    Args:
        model: the cold start.
        scorer: judges the trajectories.
        coldstart: the SFT data, for the comparison of prompts.
        rows: queries to sample on; some need two calls or more.
        sampling: temperature 1, as in training.
        on_done: called whenever a trajectory has ended.

    Raises:
        GateError: the SFT prompts are not those of the rollout; more steps would not mend that.
    """
    from rltr_verl.rollout.sft_prompts import check_prompts

    n_prompts = check_prompts(coldstart, model.tokenizer, model.planner)
    sampled = evaluate(model, scorer, list(rows) * SAMPLES, sampling, on_done)
    multi = [item for item in sampled if item.n_needs >= 2]
    if not multi:
        fix = "give rows whose `needs` list two calls or more."
        raise GateError("no query here needs two calls", where="gate", fix=fix)
    return GateFigures(_mean(sampled, "format_ok"), _mean(multi, "completeness"), n_prompts)


def refusal(figures: GateFigures, limits: GateLimits, steps: int, log: Path) -> GateError:
    """The error when all attempts are used up."""
    problem = f"the cold start is not ready for RL after {steps} steps: {figures.text(limits)}"
    fix = f"try another --seed or more --sft-steps (with --fresh); the trainer's output is in {log}."
    return GateError(problem, where="gate", fix=fix)


def _mean(items: Sequence[Evaluated], key: str) -> float:
    return sum(item.figures[key] for item in items) / len(items)
