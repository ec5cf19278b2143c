"""The commands, up to the point where work would start: one clear error each, and nothing begun."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from rltr_verl.cli.main import app
from rltr_verl.cli.quickstart import _split_algo
from rltr_verl.errors import WorldError
from rltr_verl.quickstart import Options, run
from rltr_verl.quickstart.options import Paths
from rltr_verl.quickstart.run import resume_command, run_quickstart
from rltr_verl.quickstart.state import RunState, exclusive
from rltr_verl.world import WorldSizes, build_world, load_world


def invoke(*words: object):
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "400"})
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["no.such.key=1"], "ConfigError: recipe rltr_planner: Could not override 'no.such.key'"),
        (["kl"], "'kl' is no override"),
        (["algo=sac"], "unknown algorithm 'sac'"),
        (["rltr.tools=[serch]"], "unknown tool 'serch'"),
        (["+rltr.reward.terms.completness={}"], "did you mean 'completeness'?"),
        (["+rltr.reward.flor=0"], "did you mean 'floor'?"),
    ],
)
def test_wrong_settings_end_before_any_work(out, words, named):
    status, text = invoke("quickstart", "--out", out, *words)
    assert status == 2
    assert named in text and "Fix:" in text
    assert not out.exists()


def test_a_folder_that_was_there_stays(out):
    out.mkdir()
    assert invoke("quickstart", "--out", out, "algo=sac")[0] == 2 and out.is_dir()
    (out / "mine.txt").write_text("")
    assert invoke("quickstart", "--out", out, "no.such.key=1")[0] == 2 and (out / "mine.txt").exists()


def test_a_folder_that_cannot_be_made_is_a_disk_error(tmp_path):
    (tmp_path / "file").write_text("")
    status, text = invoke("quickstart", "--out", tmp_path / "file" / "run")
    assert status == 2
    assert "DiskError: --out: " in text and "cannot be written" in text


def test_a_full_disk_is_found_before_work_starts(out, monkeypatch):
    monkeypatch.setattr(run, "NEEDED_BYTES", 1 << 60)
    status, text = invoke("quickstart", "--out", out)
    assert status == 2
    assert "DiskError" in text and "GiB are needed" in text
    assert not out.exists()


def test_a_world_of_another_version_is_refused_with_the_way_out(out):
    (out / "world").mkdir(parents=True)
    (out / "world" / "manifest.json").write_text(json.dumps({"format": "rltr_world", "version": 0, "files": {}}))
    status, text = invoke("quickstart", "--out", out)
    assert status == 2
    assert "rltr_world version 0 found" in text and "--fresh" in text
    assert not (out / "state.json").exists()


def test_a_world_of_another_seed_is_refused_with_the_way_out(out):
    build_world(out / "world", seed=3, sizes=WorldSizes(train=100, val=20, val_unseen=10, coldstart=100))
    status, text = invoke("quickstart", "--out", out)
    assert status == 2
    assert "another world is here (seed 3" in text and "--fresh" in text


def test_other_settings_than_those_of_the_run_in_the_folder_are_refused(out):
    out.mkdir()
    RunState(Paths(out).state, Options(seed=1).fingerprint()).finish("world", {})
    status, text = invoke("quickstart", "--out", out, "--seed", 2)
    assert status == 2
    assert "seed 1 -> 2" in text and "--fresh" in text


def test_two_runs_in_one_folder_do_not_meet(out):
    out.mkdir()
    with exclusive(Paths(out).lock):
        status, text = invoke("quickstart", "--out", out)
    assert status == 2
    assert "another quickstart runs in this folder" in text


def test_fresh_removes_what_a_run_left_and_nothing_else(out, monkeypatch):
    (out / "rl").mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    RunState(Paths(out).state, Options(seed=9).fingerprint()).finish("world", {})
    monkeypatch.setattr(run, "STAGES", ())
    with pytest.raises(IndexError):
        run_quickstart(Options(out=out), fresh=True)
    assert sorted(path.name for path in out.iterdir()) == [".lock", "notes.txt"]


def test_algo_may_be_given_as_an_override(out):
    assert _split_algo("grpo", ["algo=ppo", "kl=off"]) == ("ppo", ["kl=off"])
    assert _split_algo("ppo", ["kl=off"]) == ("ppo", ["kl=off"])


def test_the_command_to_go_on_repeats_the_settings(tmp_path):
    options = Options(out=tmp_path, algo="ppo", seed=3, rl_steps=5, overrides=("rltr.tools=[a b]",))
    assert (
        resume_command(options) == f"rltr quickstart --algo ppo --seed 3 --out {tmp_path} --steps 5 'rltr.tools=[a b]'"
    )
    assert resume_command(Options()) == "rltr quickstart --algo grpo --seed 1"


def test_world_build_makes_a_world_once(tmp_path):
    words = ["world", "build", "--seed", 5, "--out", tmp_path / "w", "--train", 100, "--coldstart", 100]
    status, text = invoke(*words)
    assert status == 0 and "seed 5, train 100" in text
    assert load_world(tmp_path / "w").seed == 5
    assert invoke(*words)[0] == 0
    status, text = invoke(*words[:3], 6, *words[4:])
    assert status == 2 and "another world is here" in text and "--overwrite" in text


def test_the_error_of_a_missing_world_names_a_command_that_exists(tmp_path):
    with pytest.raises(WorldError) as caught:
        load_world(tmp_path)
    command = re.findall(r"\((rltr world build [^)]*)\)", str(caught.value))[0].replace("SEED", "7").split()
    status, _ = invoke(*command[1:], "--train", 100, "--coldstart", 100)
    assert status == 0
    assert load_world(tmp_path).seed == 7
