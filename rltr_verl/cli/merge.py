"""``rltr merge``: one Hugging Face folder from a checkpoint that verl wrote in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rltr_verl.cli._errors import reports_errors


@reports_errors
def merge(
    checkpoint: Annotated[
        Path, typer.Argument(help="verl's trainer.default_local_dir (its newest step), or one of its global_step_N.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model's own Python files run.")
    ] = False,
) -> None:
    """Merge the shards of an SFT or RL checkpoint into one Hugging Face folder, by verl's own merger.

    Needed only where checkpoint.save_contents does not list hf_model, as this package's recipes for SFT do. The merged
    weights are bfloat16. The folder appears complete, or not at all.
    """
    from rich.console import Console

    from rltr_verl.checkpoints import find_shards
    from rltr_verl.merge import merge as merge_shards

    shards = find_shards(checkpoint)
    typer.echo(f"{shards.folder}: {_count(len(shards.files), f'{shards.backend} shard')}, {_mib(shards.size)}")
    with Console(stderr=True).status("merging"):
        merge_shards(shards, out, trust_remote_code=trust_remote_code)
    _report(out)


def _report(out: Path) -> None:
    weights = [path for path in out.rglob("*") if path.suffix in (".safetensors", ".bin")]
    config = json.loads((out / "config.json").read_text("utf-8"))
    size = sum(path.stat().st_size for path in weights)
    dtype = config.get("dtype") or config.get("torch_dtype")
    typer.echo(f"{out}: {_count(len(weights), 'weight file')}, {_mib(size)}, {dtype}")
    overrides = {"path": out, **_adapter(out / "lora_adapter")}
    given = " ".join(f"actor_rollout_ref.model.{key}={value}" for key, value in overrides.items())
    typer.echo(f"RL starts from it with {given}")


def _adapter(folder: Path) -> dict[str, object]:
    """What verl must be told of an adapter beside the base model; without ``lora_rank`` it ignores the path."""
    if not folder.is_dir():
        return {}
    rank = json.loads((folder / "adapter_config.json").read_text("utf-8"))["r"]
    return {"lora_adapter_path": folder, "lora_rank": rank}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
