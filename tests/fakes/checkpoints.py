"""Folders as verl's checkpoint managers leave them, with bytes in place of weights."""

from __future__ import annotations

import json
from pathlib import Path


def settings(folder: Path, **config) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fsdp(folder: Path, ranks: int = 2) -> Path:
    """What verl leaves of an FSDP model without ``hf_model``."""
    settings(folder / "huggingface")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    for rank in range(ranks):
        (folder / f"model_world_size_{ranks}_rank_{rank}.pt").write_bytes(b"x" * 10)
        (folder / f"optim_world_size_{ranks}_rank_{rank}.pt").write_bytes(b"x" * 20)
    return folder


def megatron(folder: Path, **config) -> Path:
    settings(folder / "model" / "huggingface", **config)
    (folder / "model" / "dist_ckpt").mkdir()
    for name in (".metadata", "__0_0.distcp", "__0_1.distcp"):
        (folder / "model" / "dist_ckpt" / name).write_bytes(b"x")
    return folder


def whole(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def track(folder: Path, step: int | str) -> Path:
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder
