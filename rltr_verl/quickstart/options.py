"""What a quickstart run is asked to do, and where its files go."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rltr_verl.errors import ConfigError
from rltr_verl.world import WorldSizes

ALGOS = ("grpo", "ppo", "reinforce_pp")
"""RL algorithms: the recipe group ``algo``."""


@dataclass(frozen=True)
class GateLimits:
    """What the cold start must reach before RL starts (ours).

    format_ok: share of sampled trajectories that are well formed. multi_call: sampled completeness of queries that need
    two calls or more; below it most groups of rollouts are all failures, and teach nothing. more_steps: SFT steps
    added when it is short, at most ``attempts`` times.
    """

    format_ok: float = 0.95
    multi_call: float = 0.1
    more_steps: int = 150
    attempts: int = 3


@dataclass(frozen=True)
class Options:
    """Settings of a run; two runs in one folder must have the same.

    Args:
        out: folder of the run.
        algo: one of :data:`ALGOS`.
        seed: of the world, the model, the data order and the sampling.
        sft_steps: steps of the cold start, 24 conversations each.
        rl_steps: RL steps.
        overrides: Hydra overrides for ``main_ppo``, placed last.
        sizes: of the world.
        gate: what the cold start must reach.
    """

    out: Path = Path("outputs/quickstart")
    algo: str = "grpo"
    seed: int = 1
    sft_steps: int = 700
    rl_steps: int = 50
    overrides: tuple[str, ...] = ()
    sizes: WorldSizes = field(default_factory=WorldSizes)
    gate: GateLimits = field(default_factory=GateLimits)

    def __post_init__(self) -> None:
        if self.algo not in ALGOS:
            raise ConfigError(f"unknown algorithm '{self.algo}'", where="--algo", fix=f"use one of {', '.join(ALGOS)}.")
        for name in ("sft_steps", "rl_steps"):
            if getattr(self, name) < 1:
                raise ConfigError("at least one step is needed", where=f"--{name.replace('_', '-')}", fix="raise it.")
        for override in self.overrides:
            if "=" not in override and not override.startswith("~"):
                fix = "write key=value, as verl takes it."
                raise ConfigError(f"'{override}' is no override", where="quickstart", fix=fix)

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for a run to be continued: everything but the folder."""
        values = asdict(self)
        del values["out"]
        return {**values, "overrides": list(self.overrides)}


class Paths:
    """Files of a run under ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / "state.json"
        self.world = root / "world"
        self.logs = root / "logs"
        self.metrics = root / "metrics"
        self.coldstart = root / "coldstart"
        self.rl = root / "rl"
        self.trajectories = root / "trajectories"
        self.evaluation = root / "evaluation"
        self.summary = root / "summary.json"
        self.report = root / "report.html"
        self.curves = root / "curves.png"

    @property
    def lock(self) -> Path:
        """Held by the process that runs here."""
        return self.root / ".lock"

    def made_by_us(self) -> list[Path]:
        """Everything a run may leave; ``--fresh`` removes these and nothing else."""
        return [path for name, path in vars(self).items() if name != "root"]
