"""Which shards a folder holds, and what is refused; real shards are merged in ``tests/e2e/test_coldstart_sft.py``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rltr_verl.checkpoints import checkpoint_fix, find_shards, is_model, newest_step
from rltr_verl.errors import ModelError
from tests.fakes.checkpoints import fsdp, megatron, settings, track, whole

INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}


@pytest.mark.parametrize("inside", ["", "actor"])
@pytest.mark.parametrize("given", ["", "global_step_4", "inside"])
def test_shards_are_found_from_the_runs_folder_the_steps_and_the_actors(tmp_path, inside, given):
    fsdp(tmp_path / "global_step_2" / inside)
    newest = fsdp(tmp_path / "global_step_4" / inside)
    track(tmp_path, 4)
    shards = find_shards(newest if given == "inside" else tmp_path / given)
    assert (shards.folder, shards.backend, shards.size) == (newest, "fsdp", 20)
    assert [file.name for file in shards.files] == [f"model_world_size_2_rank_{rank}.pt" for rank in range(2)]
    assert shards.settings == newest / "huggingface"


def test_shards_of_another_number_of_ranks_are_left_alone(tmp_path):
    (fsdp(tmp_path / "c") / "model_world_size_4_rank_0.pt").write_bytes(b"x" * 99)
    assert find_shards(tmp_path / "c").size == 20


def test_the_newest_step_is_the_one_that_verl_says_is_finished(tmp_path):
    assert newest_step(tmp_path) is None
    (tmp_path / "global_step_9").mkdir()
    for named in ("", "x", 8):
        assert newest_step(track(tmp_path, named)) is None
    assert newest_step(track(tmp_path, 9)) == (9, tmp_path / "global_step_9")


def test_a_model_is_whole_with_all_files_of_its_index(tmp_path):
    folder = settings(tmp_path / "m")
    assert not is_model(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    for name in INDEX["weight_map"].values():
        assert not is_model(folder)
        (folder / name).write_bytes(b"x")
    assert is_model(folder)


def nothing(folder: Path) -> Path:
    (folder / "logs").mkdir(parents=True)
    return folder


def untracked(folder: Path) -> Path:
    for step in (2, 4):
        fsdp(folder / f"global_step_{step}")
    return folder


def without(name: str):
    def build(folder: Path) -> Path:
        (fsdp(folder) / name).unlink()
        return folder

    return build


def empty_shard(folder: Path) -> Path:
    (fsdp(folder) / "model_world_size_2_rank_1.pt").write_bytes(b"")
    return folder


def torn_settings(folder: Path) -> Path:
    (fsdp(folder) / "fsdp_config.json").write_text('{"FSDP_ver')
    return folder


def saved_whole(folder: Path) -> Path:
    return whole(fsdp(folder) / "huggingface").parent


def bridged(folder: Path) -> Path:
    return whole(folder / "model" / "huggingface").parents[1]


def emptied(folder: Path) -> Path:
    for file in (megatron(folder) / "model" / "dist_ckpt").iterdir():
        file.unlink()
    return folder


def older(folder: Path) -> Path:
    (folder / "dist_ckpt").mkdir(parents=True)
    return folder


REFUSED = [
    (lambda folder: folder, r"no folder '.*'\. Fix: give a trainer\.default_local_dir"),
    (nothing, r"no checkpoint of verl's here\. Fix: give a trainer\.default_local_dir"),
    (untracked, r"names no step that is there; give one of global_step_2, global_step_4"),
    (whole, r"a Hugging Face model already\. Fix: use it as it is: actor_rollout_ref\.model\.path=\S+/c$"),
    (saved_whole, r"holds the whole model already\. Fix: use \S+/c/huggingface \(hf_model"),
    (bridged, r"holds the whole model already\. Fix: use \S+/c/model/huggingface \(hf_model"),
    (without("model_world_size_2_rank_1.pt"), r"1 of 2 ranks' weights are missing \(model_world_size_2_rank_1\.pt\)"),
    (empty_shard, r"1 of 2 ranks' weights are missing"),
    (without("fsdp_config.json"), r"no fsdp_config\.json.*use an earlier global_step_N"),
    (without("huggingface/config.json"), r"no config\.json.*use an earlier global_step_N"),
    (torn_settings, r"fsdp_config\.json: holds no readable 'world_size'\. Fix: .*use an earlier global_step_N"),
    (emptied, r"model/dist_ckpt holds no weights"),
    (older, r"older layout.*migrate_megatron_checkpoint_layout"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED)
def test_what_cannot_be_merged_is_refused_with_the_fix(tmp_path, build, message):
    with pytest.raises(ModelError, match=message):
        find_shards(build(tmp_path / "c"))


def test_a_folder_of_checkpoints_given_as_a_model_is_answered_with_the_way_to_the_model(tmp_path):
    sharded, saved = fsdp(tmp_path / "a"), saved_whole(tmp_path / "b")
    assert checkpoint_fix(sharded) == f"merge its shards first: rltr merge {sharded} --out FOLDER"
    assert checkpoint_fix(sharded / "huggingface") == checkpoint_fix(sharded)
    assert f"use {saved}/huggingface" in checkpoint_fix(saved)
    meg = megatron(tmp_path / "d")
    assert checkpoint_fix(meg / "model" / "huggingface") == f"merge its shards first: rltr merge {meg} --out FOLDER"
    others = (saved / "huggingface", nothing(tmp_path / "e"), settings(tmp_path / "f" / "huggingface"), tmp_path / "g")
    for other in others:
        assert checkpoint_fix(other) is None


def test_what_verl_saves_of_a_lora_model_is_not_taken_for_a_model(tmp_path):
    checkpoint = saved_whole(tmp_path / "c")
    assert checkpoint_fix(checkpoint / "huggingface") is None
    (checkpoint / "lora_train_meta.json").write_text("{}")
    assert find_shards(checkpoint).folder == checkpoint
    for given in (checkpoint, checkpoint / "huggingface"):
        assert checkpoint_fix(given) == f"merge its shards first: rltr merge {checkpoint} --out FOLDER"
