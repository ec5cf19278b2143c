"""Building and opening a world folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from rltr_verl.errors import WorldError
from rltr_verl.world import WorldSizes, build_world, load_world


def digests(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_same_seed_gives_same_bytes_in_another_process(world, small_sizes, tmp_path):
    code = f"from rltr_verl.world import *; build_world({str(tmp_path / 'w')!r}, 1, {small_sizes!r})"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert digests(tmp_path / "w") == digests(world.folder)


def test_another_seed_gives_another_world(world, small_sizes, tmp_path):
    other = build_world(tmp_path / "w", 2, small_sizes)
    ours, theirs = digests(world.folder), digests(other.folder)
    same = {name for name in ours if ours[name] == theirs[name]}
    assert same <= {
        "model/chat_template.jinja",
        "model/config.json",
        "model/generation_config.json",
        "model/tokenizer_config.json",
    }


def test_manifest_lists_every_file_with_its_digest(world):
    manifest = json.loads((world.folder / "manifest.json").read_text())
    found = digests(world.folder)
    found.pop("manifest.json")
    assert manifest["files"] == found
    assert manifest["seed"] == 1


def test_load_returns_what_was_built(world, small_sizes):
    opened = load_world(world.folder)
    assert (opened.seed, opened.sizes) == (1, small_sizes)
    assert opened.split("val").exists() and opened.corpus.exists() and (opened.model / "config.json").exists()


def test_building_again_keeps_the_folder(world, small_sizes):
    before = (world.folder / "manifest.json").stat().st_mtime_ns
    assert build_world(world.folder, 1, small_sizes) == world
    assert (world.folder / "manifest.json").stat().st_mtime_ns == before


@pytest.fixture
def copied(world, tmp_path):
    return shutil.copytree(world.folder, tmp_path / "copy")


def test_another_seed_is_refused_without_overwrite(copied, small_sizes):
    with pytest.raises(WorldError, match="seed 1.*overwrite"):
        build_world(copied, 2, small_sizes)
    assert load_world(copied).seed == 1
    assert build_world(copied, 2, small_sizes, overwrite=True).seed == load_world(copied).seed == 2


def test_another_version_is_refused_with_the_fix(copied):
    manifest = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps(manifest | {"version": 0}))
    with pytest.raises(WorldError, match="version 0 found.*version 2.*rltr world build"):
        load_world(copied)


def test_sizes_of_another_version_are_refused_with_the_fix(copied):
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["sizes"]["coldstart_siblings"] = 3
    (copied / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(WorldError, match="another version.*coldstart_siblings.*Fix: .*rltr world build"):
        load_world(copied)


def test_broken_folders_are_refused(copied, tmp_path):
    with pytest.raises(WorldError, match="no world here.*rltr world build"):
        load_world(tmp_path / "nothing")
    (copied / "val.parquet").unlink()
    with pytest.raises(WorldError, match="val.parquet is missing"):
        load_world(copied)
    (copied / "manifest.json").write_text("{")
    with pytest.raises(WorldError, match="not JSON"):
        load_world(copied)
    (copied / "manifest.json").write_text("[]")
    with pytest.raises(WorldError, match="found"):
        load_world(copied)


def test_a_folder_with_other_files_is_left_alone(tmp_path, small_sizes):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(WorldError, match="holds other files"):
        build_world(tmp_path, 1, small_sizes, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failed_build_leaves_nothing(tmp_path, small_sizes, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rltr_verl.world.build._write_manifest", full)
    with pytest.raises(OSError, match="No space"):
        build_world(tmp_path / "w", 1, small_sizes)
    assert list(tmp_path.iterdir()) == []


def test_rows_are_what_verl_reads(world):
    frame = pd.read_parquet(world.split("val"))
    row = frame.iloc[5].to_dict()
    info = row["extra_info"]
    assert row["data_source"] == f"rltr_world/{info['kind']}"
    assert row["prompt"][0] == {"role": "user", "content": info["query"]}
    assert row["agent_name"] == "rltr_planner"
    assert row["reward_model"] == {"style": "rule", "ground_truth": info["reference"]}
    assert [entry["index"] for entry in frame["extra_info"]] == list(range(len(frame)))
    lines = world.folder.joinpath("val.jsonl").read_text().splitlines()
    assert json.loads(lines[5]) == info


def test_sizes_that_leave_a_kind_out_are_refused():
    with pytest.raises(WorldError, match="too small"):
        WorldSizes(train=9)
    with pytest.raises(WorldError, match="too small"):
        WorldSizes(coldstart=100, siblings=200)


def test_a_file_in_the_way_is_named(tmp_path, small_sizes):
    (tmp_path / "w").write_text("mine")
    with pytest.raises(WorldError, match="this is a file"):
        build_world(tmp_path / "w", 1, small_sizes)
