"""What lies in a folder of verl's checkpoints: shards of a model, or a whole one.

    DIR/latest_checkpointed_iteration.txt        step of the newest checkpoint
    DIR/global_step_N/                           SFT's shards; in RL they lie in global_step_N/actor
        fsdp_config.json, model_world_size_W_rank_R.pt, huggingface/           FSDP
        model/dist_ckpt/, model/huggingface/                                   Megatron

The folder ``huggingface`` always holds configuration and tokenizer; it holds the weights too where
``checkpoint.save_contents`` lists ``hf_model`` (Megatron: also without dist checkpointing).

With LoRA, what verl saves as ``hf_model`` is no model: its weights are named as PEFT names them, and a model that loads
it is left as it was initialised. The shards are what counts then.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rltr_verl.errors import ModelError

TRACKER = "latest_checkpointed_iteration.txt"
LORA = "lora_train_meta.json"
_PLACES = {"fsdp": "huggingface", "megatron": "model/huggingface"}
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Shards:
    """The sharded weights of one model at one step.

    Attributes:
        folder: what verl's merger takes as ``--local_dir``.
        backend: which of its mergers reads them.
        files: the files of the weights, one a rank for FSDP.
    """

    folder: Path
    backend: Literal["fsdp", "megatron"]
    files: tuple[Path, ...]

    @property
    def settings(self) -> Path:
        """Folder of the model's configuration and tokenizer."""
        return self.folder / _PLACES[self.backend]

    @property
    def size(self) -> int:
        """Bytes of the weights, an upper bound of what the merged ones take."""
        return sum(file.stat().st_size for file in self.files)


def newest_step(folder: Path) -> tuple[int, Path] | None:
    """Step and folder of the newest complete checkpoint that verl has written under ``folder``."""
    tracker = folder / TRACKER
    if not tracker.is_file() or not tracker.read_text().strip().isdigit():
        return None
    step = int(tracker.read_text())
    checkpoint = folder / f"global_step_{step}"
    return (step, checkpoint) if checkpoint.is_dir() else None


def is_model(folder: Path) -> bool:
    """Does a folder hold a Hugging Face model: its configuration and every file of its weights?"""
    if not (folder / "config.json").is_file():
        return False
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        names = set(_read(index, "weight_map").values()) if index.is_file() else {name}
        if all((folder / one).is_file() for one in names):
            return True
    return False


def saved_ranks(checkpoint: Path) -> int | None:
    """How many ranks wrote an FSDP checkpoint; None where none did.

    Raises:
        ModelError: ``fsdp_config.json`` cannot be read.
    """
    settings = checkpoint / "fsdp_config.json"
    return int(_read(settings, "world_size")) if settings.is_file() else None


def find_shards(checkpoint: Path) -> Shards:
    """The shards to merge in a folder of checkpoints (its newest step), a step's folder, or an actor's.

    Raises:
        ModelError: there is no checkpoint, it is a whole model already (the fix says where), or parts are missing.
    """
    if not checkpoint.is_dir():
        raise ModelError(f"no folder '{checkpoint}'", where="checkpoint", fix=_give())
    if is_model(checkpoint):
        fix = f"use it as it is: actor_rollout_ref.model.path={checkpoint}"
        raise ModelError("this is a Hugging Face model already", where=str(checkpoint), fix=fix)
    folder, backend = _locate(checkpoint)
    model = folder / _PLACES[backend]
    if is_model(model) and not (folder / LORA).is_file():
        fix = f"use {model} (hf_model in checkpoint.save_contents wrote it)."
        raise ModelError("the checkpoint holds the whole model already", where=str(folder), fix=fix)
    if not (model / "config.json").is_file():
        raise ModelError("no config.json", where=str(model), fix=f"{_torn()}.")
    return Shards(folder, backend, _fsdp_files(folder) if backend == "fsdp" else _megatron_files(folder))


def checkpoint_fix(folder: Path) -> str | None:
    """What to give as the model's path in place of a folder of checkpoints, or None if ``folder`` is not one."""
    checkpoint = folder
    if folder.name == "huggingface":
        checkpoint = folder.parent.parent if folder.parent.name == "model" else folder.parent
    if is_model(folder) and not (checkpoint / LORA).is_file():
        return None
    if not any(_backend(place) for place in _places(checkpoint)):
        return None
    try:
        shards = find_shards(checkpoint)
    except ModelError as error:
        return error.fix
    return f"merge its shards first: rltr merge {shards.folder} --out FOLDER"


def _places(checkpoint: Path) -> list[Path]:
    """Where the shards of a checkpoint may lie, the nearest first."""
    newest = newest_step(checkpoint)
    steps = [checkpoint] if newest is None else [newest[1]]
    return [place for step in steps for place in (step, step / "actor")]


def _locate(checkpoint: Path) -> tuple[Path, Literal["fsdp", "megatron"]]:
    for place in _places(checkpoint):
        backend = _backend(place)
        if backend is not None:
            return place, backend
    if (checkpoint / "dist_ckpt").is_dir() or (checkpoint / "actor" / "dist_ckpt").is_dir():
        fix = "move it to today's with verl's scripts/migrate_megatron_checkpoint_layout.py."
        raise ModelError("this is an older layout of verl's Megatron checkpoints", where=str(checkpoint), fix=fix)
    raise ModelError("no checkpoint of verl's here", where=str(checkpoint), fix=_give(checkpoint))


def _backend(folder: Path) -> Literal["fsdp", "megatron"] | None:
    """Whose checkpoint lies in a folder, by the files that only one of them writes."""
    if (folder / "fsdp_config.json").is_file() or next(folder.glob("model_world_size_*_rank_*.pt"), None):
        return "fsdp"
    if (folder / "model" / "dist_ckpt").is_dir() or (folder / "model" / "huggingface").is_dir():
        return "megatron"
    return None


def _fsdp_files(folder: Path) -> tuple[Path, ...]:
    """One file a rank, all of them there."""
    ranks = saved_ranks(folder)
    if ranks is None:
        raise ModelError("no fsdp_config.json, which names the number of ranks", where=str(folder), fix=f"{_torn()}.")
    files = tuple(folder / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks))
    missing = [file.name for file in files if not file.is_file() or not file.stat().st_size]
    if missing:
        problem = f"{len(missing)} of {ranks} ranks' weights are missing ({', '.join(missing[:3])})"
        fix = f"copy them here if another node wrote them to its own disk; otherwise {_torn()}."
        raise ModelError(problem, where=str(folder), fix=fix)
    return files


def _megatron_files(folder: Path) -> tuple[Path, ...]:
    files = tuple(sorted(file for file in (folder / "model" / "dist_ckpt").glob("*") if file.is_file()))
    if not files:
        raise ModelError("model/dist_ckpt holds no weights", where=str(folder), fix=f"{_torn()}.")
    return files


def _read(file: Path, key: str) -> Any:
    """A key of a JSON file that verl wrote."""
    try:
        return json.loads(file.read_text("utf-8"))[key]
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"holds no readable '{key}'", where=str(file), fix=f"{_torn()}.") from None


def _torn() -> str:
    return "the run was ended while it saved, or never saved 'model': use an earlier global_step_N"


def _give(checkpoint: Path | None = None) -> str:
    steps = [] if checkpoint is None else sorted(path.name for path in checkpoint.glob("global_step_*"))
    if steps:
        return f"{TRACKER} names no step that is there; give one of {', '.join(steps)}."
    return "give a trainer.default_local_dir of verl's, or one of its folders global_step_N."
