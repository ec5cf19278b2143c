"""`rltr merge` as a user calls it; what it merges is tried in ``tests/e2e/test_coldstart_sft.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rltr_verl import merge as library
from rltr_verl.checkpoints import Shards
from rltr_verl.cli.merge import merge

app = typer.Typer()
app.command()(merge)


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def checkpoint(tmp_path, tiny_folder) -> Path:
    """Settings and tokenizer of the tiny model, and shards that a stand-in for verl's merger does not read."""
    folder = tmp_path / "run" / "global_step_3"
    (folder / "huggingface").mkdir(parents=True)
    for file in tiny_folder.iterdir():
        if file.suffix != ".safetensors":
            (folder / "huggingface" / file.name).write_bytes(file.read_bytes())
    (folder / "fsdp_config.json").write_text(json.dumps({"world_size": 1}))
    (folder / "model_world_size_1_rank_0.pt").write_bytes(b"x" * (1 << 19))
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


@pytest.fixture
def merger(monkeypatch):
    """Stands in for verl's merger, which needs real shards: any Python program, given the target as its argument."""

    def use(program: str) -> None:
        def command(shards: Shards, target: Path, trust_remote_code: bool) -> tuple[str, ...]:
            return (sys.executable, "-c", program, str(target))

        monkeypatch.setattr(library, "merger_command", command)

    return use


WRITES = """
import json, pathlib, sys
target = pathlib.Path(sys.argv[1])
target.mkdir()
(target / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
(target / "model.safetensors").write_bytes(b"x" * (1 << 18))
"""


def test_it_says_what_it_found_and_how_rl_starts(checkpoint, merger, tmp_path):
    merger(WRITES)
    out = tmp_path / "new" / "merged"
    done = run(checkpoint.parent, "--out", out)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"{checkpoint}: 1 fsdp shard, 0.5 MiB",
        f"{out}: 1 weight file, 0.2 MiB, bfloat16",
        f"RL starts from it with actor_rollout_ref.model.path={out}",
    ]
    assert [path.name for path in out.parent.iterdir()] == ["merged"]


def test_an_empty_folder_is_a_target(checkpoint, merger, tmp_path):
    merger(WRITES)
    (tmp_path / "merged").mkdir()
    assert run(checkpoint, "--out", tmp_path / "merged").exit_code == 0
    assert (tmp_path / "merged" / "model.safetensors").stat().st_size == 1 << 18


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (WRITES + "raise SystemExit('disk on fire')", "ended with status 1"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
        (WRITES + "(target / 'model.safetensors').unlink()", "left no whole model"),
    ],
)
def test_a_merger_that_does_not_finish_leaves_no_target(checkpoint, merger, tmp_path, program, named):
    merger(program)
    done = run(checkpoint, "--out", tmp_path / "merged")
    assert done.exit_code == 2 and named in done.output and "Traceback" not in done.output
    assert not (tmp_path / "merged").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_is_refused_is_one_clear_error(tmp_path):
    done = run(tmp_path / "none", "--out", tmp_path / "merged")
    assert done.exit_code == 2 and "ModelError" in done.output and "Fix:" in done.output
