"""Ranks, batch, rows and token budget of an SFT run fit each other.

verl's SFT trainer takes its number of ranks from torchrun alone, rounds a batch that does not divide among them down,
divides by zero where a file holds less than one batch, and goes on only with as many ranks as wrote the checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from rltr_verl.checkpoints import newest_step, saved_ranks
from rltr_verl.errors import ConfigError, DataError


def check_ranks(config: DictConfig, rows: int) -> None:
    """Check what can be known before the model is loaded.

    Args:
        config: the composed recipe.
        rows: rows of all training files.

    Raises:
        ConfigError: torchrun starts another number of ranks than the recipe names; the batch does not divide among
            them; a row of ``data.max_length`` tokens fits no micro batch; the checkpoint to go on from is of another
            number of ranks.
        DataError: the files hold less than one batch.
    """
    ranks = _ranks(config)
    parallel = int(config.engine.get("ulysses_sequence_parallel_size", 1))
    batch, key = int(config.data.train_batch_size), "data.train_batch_size"
    if ranks % parallel or batch % (ranks // parallel):
        problem = f"{batch} rows cannot be shared by {ranks} ranks, {parallel} to a row"
        fix = f"make it a multiple of {max(1, ranks // parallel)}, or change engine.ulysses_sequence_parallel_size."
        raise ConfigError(problem, where=key, fix=fix)
    _check_budget(config, parallel)
    _check_resumed(config, ranks)
    limit = int(config.data.get("train_max_samples", -1))
    rows = min(rows, limit) if limit > 0 else rows
    if rows < batch:
        problem = f"the files hold {rows} rows, and a batch takes {batch}"
        raise DataError(problem, where="data.train_files", fix=f"give more rows, or set {key}={rows} or less.")


def _ranks(config: DictConfig) -> int:
    """What torchrun says it starts; without torchrun, what the recipe names."""
    named = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
    started = int(os.environ.get("WORLD_SIZE", named))
    if started != named:
        problem = f"torchrun starts {started} ranks, the recipe names {named}"
        fix = "set trainer.nnodes and trainer.n_gpus_per_node to torchrun's --nnodes and --nproc_per_node."
        raise ConfigError(problem, where="trainer.nnodes x trainer.n_gpus_per_node", fix=fix)
    return started


def _check_budget(config: DictConfig, parallel: int) -> None:
    data = config.data
    room = int(data.max_token_len_per_gpu) * parallel
    if data.use_dynamic_bsz and room < int(data.max_length):
        problem = f"a row of data.max_length={data.max_length} tokens does not fit into {room}"
        fix = "raise it, or engine.ulysses_sequence_parallel_size, or lower data.max_length."
        raise ConfigError(problem, where="data.max_token_len_per_gpu", fix=fix)


def _check_resumed(config: DictConfig, ranks: int) -> None:
    newest = newest_step(Path(config.trainer.default_local_dir)) if config.trainer.resume_mode == "auto" else None
    saved = saved_ranks(newest[1]) if newest else None
    if newest and saved not in (None, ranks):
        problem = f"{newest[1]} was written by {saved} ranks, and verl goes on with as many only; this run has {ranks}"
        fix = f"start {saved} ranks, or a new run: another trainer.default_local_dir, from a merged model (rltr merge)."
        raise ConfigError(problem, where="trainer.default_local_dir", fix=fix)
