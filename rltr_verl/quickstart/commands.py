"""The two commands a quickstart runs, exactly as a user would type them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rltr_verl.quickstart.options import Options, Paths
from rltr_verl.quickstart.process import Command

SAVE_EVERY = 10
"""RL steps between two checkpoints: what an interruption costs at most."""


def world_command(options: Options, paths: Paths) -> Command:
    """``rltr world build`` for this run's world (the stage builds it in its own process)."""
    return Command(("rltr", "world", "build", "--seed", str(options.seed), "--out", str(paths.world)))


def sft_command(options: Options, paths: Paths, steps: int, metrics: Path) -> Command:
    """verl's SFT trainer up to ``steps`` steps in all; goes on from its own checkpoint."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
    trainer = ("-m", "verl.trainer.sft_trainer", "--config-name", "rltr_coldstart_sft")
    overrides = (
        "sft_scale=cpu",
        f"rltr.world={_absolute(paths.world)}",
        f"trainer.default_local_dir={_absolute(paths.coldstart)}",
        f"trainer.total_training_steps={steps}",
        f"trainer.seed={options.seed}",
        "trainer.logger=[console,file]",
    )
    # One thread: the model is too small to gain from more, and where a core is busy a second one holds every step up.
    return Command((*launcher, *trainer, *overrides), {**_variables(metrics), "RLTR_CPU_THREADS": "1"})


def rl_overrides(options: Options, paths: Paths, model: Path) -> tuple[str, ...]:
    """Hydra overrides of the RL stage on top of the recipe ``rltr_planner``; the user's come last."""
    return (
        "scale=cpu",
        f"algo={options.algo}",
        f"rltr.world={_absolute(paths.world)}",
        f"actor_rollout_ref.model.path={_absolute(model)}",
        f"data.seed={options.seed}",
        f"trainer.total_training_steps={options.rl_steps}",
        *options.overrides,
    )


def rl_command(
    options: Options, paths: Paths, model: Path, metrics: Path, trajectories: Path, ray_dir: Path
) -> Command:
    """Stock ``main_ppo``; goes on from its own checkpoint."""
    saving = (
        f"trainer.default_local_dir={_absolute(paths.rl)}",
        f"trainer.save_freq={SAVE_EVERY}",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.max_critic_ckpt_to_keep=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "trainer.val_before_train=false",
        "trainer.logger=[console,file]",
        f"rltr.dump_dir={_absolute(trajectories)}",
        f"+ray_kwargs.ray_init._temp_dir={ray_dir}",
        "+ray_kwargs.ray_init.address=local",
    )
    head = (sys.executable, "-m", "verl.trainer.main_ppo", "--config-name", "rltr_planner")
    argv = (*head, *saving, *rl_overrides(options, paths, model))
    return Command(argv, _variables(metrics))


def _variables(metrics: Path) -> dict[str, str]:
    """The CPU backend also where there is a GPU: the recipe's scale is ``cpu``."""
    return {"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": _absolute(metrics)}


def _absolute(path: Path) -> str:
    return os.path.abspath(path)
