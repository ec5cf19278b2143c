"""From a checkpoint that verl wrote in shards to one Hugging Face folder, by verl's own merger.

The merger reads all shards into this machine's memory and writes bfloat16, while ``hf_model`` in
``checkpoint.save_contents`` keeps the type that was trained. Of a LoRA model it makes the base model with
``lora_adapter/`` in it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from rltr_verl.checkpoints import Shards, is_model
from rltr_verl.errors import ConfigError, StageError


def merge(
    shards: Shards, out: Path, *, trust_remote_code: bool = False, watch: Callable[[], None] = lambda: None
) -> None:
    """Run verl's merger; ``out`` appears complete or not at all.

    Args:
        shards: what :func:`rltr_verl.checkpoints.find_shards` found.
        out: a folder that is not there yet, or is empty.
        trust_remote_code: let the model's own Python files run.
        watch: called again and again while the merger runs.

    Raises:
        ConfigError: ``out`` is taken, or Megatron is not installed here.
        DiskError: there is no room for the weights.
        ModelError: the tokenizer cannot be read.
        StageError: the merger failed; its whole output is in the file ``<out>.merge.log``.
    """
    out = out.absolute()
    _check(shards, out, trust_remote_code)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        target = Path(scratch) / "model"
        _run(merger_command(shards, target, trust_remote_code), out.with_name(f"{out.name}.merge.log"), watch)
        if not is_model(target):
            raise StageError("verl's merger left no whole model", where=str(shards.folder), fix="check verl's version.")
        os.replace(target, out)


def _check(shards: Shards, out: Path, trust_remote_code: bool) -> None:
    """All that can be known before the weights are read."""
    from rltr_verl.preflight import load_tokenizer, require_room

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        problem = f"'{out}' is not empty" if out.is_dir() else f"'{out}' is a file"
        raise ConfigError(problem, where="--out", fix="give a folder that is not there yet.")
    if shards.backend == "megatron" and find_spec("megatron") is None:
        fix = "merge where it was trained, or pip install megatron-core."
        raise ConfigError("Megatron's shards are read by Megatron, which is not installed", where="backend", fix=fix)
    require_room(out, "--out", shards.size)
    if not trust_remote_code:  # else the tokenizer may be code that only the merger is told to run
        load_tokenizer(str(shards.settings), str(shards.settings))


def merger_command(shards: Shards, target: Path, trust_remote_code: bool = False) -> tuple[str, ...]:
    """verl's merger with its arguments. Megatron's does not know by itself whether the embeddings are tied."""
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", shards.backend]
    command += ["--local_dir", str(shards.folder), "--target_dir", str(target)]
    config = json.loads((shards.settings / "config.json").read_text("utf-8"))
    if shards.backend == "megatron" and config.get("tie_word_embeddings"):
        command.append("--tie-word-embedding")
    if trust_remote_code:
        command.append("--trust-remote-code")
    return tuple(command)


def _run(command: tuple[str, ...], log: Path, watch: Callable[[], None]) -> None:
    from rltr_verl.quickstart.process import Command, run_logged

    try:
        run_logged(Command(command), log, watch)
    except StageError as error:
        raise StageError(error.problem, where="verl.model_merger", fix=f"the whole output is in {log}.") from None
    log.unlink()
