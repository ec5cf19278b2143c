"""The merger's command, and that a target is complete or absent; real shards: ``tests/e2e/test_coldstart_sft.py``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from rltr_verl.checkpoints import Shards, find_shards
from rltr_verl.errors import ConfigError, DiskError, ModelError, StageError
from rltr_verl.merge import merge, merger_command
from tests.fakes.checkpoints import fsdp, megatron


@pytest.mark.parametrize("tied", [True, False])
def test_megatron_is_told_of_tied_embeddings(tmp_path, tied):
    shards = find_shards(megatron(tmp_path / "c", tie_word_embeddings=tied))
    assert shards.backend == "megatron" and len(shards.files) == 3
    command = merger_command(shards, tmp_path / "out", trust_remote_code=True)
    assert command[:5] == (sys.executable, "-m", "verl.model_merger", "merge", "--backend")
    assert command[5:10] == ("megatron", "--local_dir", str(tmp_path / "c"), "--target_dir", str(tmp_path / "out"))
    assert command[10:] == (("--tie-word-embedding",) if tied else ()) + ("--trust-remote-code",)


def mergeable(folder: Path, tiny_folder: Path) -> Shards:
    shutil.copytree(tiny_folder, fsdp(folder) / "huggingface", dirs_exist_ok=True)
    (folder / "huggingface" / "model.safetensors").unlink()
    return find_shards(folder)


@pytest.mark.parametrize("taken", ["folder", "file"])
def test_a_target_that_is_taken_is_refused_and_kept(tmp_path, taken):
    target = tmp_path / "out"
    kept = target / "mine.txt" if taken == "folder" else target
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")
    with pytest.raises(ConfigError, match="--out: .*Fix: give a folder that is not there yet"):
        merge(find_shards(fsdp(tmp_path / "c")), target)
    assert kept.read_text() == "mine"


def test_megatrons_shards_need_megatron(tmp_path):
    with pytest.raises(ConfigError, match="pip install megatron-core"):
        merge(find_shards(megatron(tmp_path / "c")), tmp_path / "out")


def test_a_disk_that_is_too_small_is_named_first(tmp_path):
    file = fsdp(tmp_path / "c") / "model_world_size_2_rank_1.pt"
    with file.open("wb") as sparse:
        sparse.truncate(1 << 43)
    with pytest.raises(DiskError, match="--out: only"):
        merge(find_shards(tmp_path / "c"), tmp_path / "out")


def test_a_tokenizer_that_cannot_be_read_is_named_first(tmp_path):
    with pytest.raises(ModelError, match="huggingface' has no usable tokenizer"):
        merge(find_shards(fsdp(tmp_path / "c")), tmp_path / "out")


@pytest.mark.slow
def test_a_merger_that_fails_leaves_its_output_and_no_target(tmp_path, tiny_folder):
    shards = mergeable(tmp_path / "c", tiny_folder)
    with pytest.raises(StageError, match=r"(?s)verl\.model_merger: .* status 1.*UnpicklingError.*out\.merge\.log"):
        merge(shards, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "out.merge.log"]
    assert "Got device mesh" not in (log := (tmp_path / "out.merge.log").read_text()) and "torch.load" in log
