"""What a run remembers, and whom it refuses."""

from __future__ import annotations

import json
import time

import pytest

from rltr_verl.errors import ConfigError
from rltr_verl.quickstart.options import Options
from rltr_verl.quickstart.state import RunState, exclusive


def test_a_new_state_knows_what_an_earlier_one_finished(tmp_path):
    path, settings = tmp_path / "state.json", Options(seed=3).fingerprint()
    first = RunState(path, settings)
    with first.running("world"):
        time.sleep(0.05)
    first.finish("world", {"train": 7})
    first.note("gate", extra=2)

    second = RunState(path, settings)
    assert second.is_done("world") and not second.is_done("gate")
    assert second.result("world") == {"train": 7}
    assert second.notes("gate") == {"extra": 2}
    assert second.seconds["world"] >= 0.05


def test_time_and_attempts_add_up_over_interruptions(tmp_path):
    path, settings = tmp_path / "state.json", Options().fingerprint()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), RunState(path, settings).running("rl"):
            time.sleep(0.05)
            raise KeyboardInterrupt
    state = RunState(path, settings)
    assert state.attempt("rl") == 2
    assert state.interruptions == 1
    assert state.seconds["rl"] >= 0.1
    assert not state.is_done("rl")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Options(seed=2), "seed 1 -> 2"),
        (Options(algo="ppo"), "algo 'grpo' -> 'ppo'"),
        (Options(overrides=("kl=off",)), r"overrides \[\] -> \['kl=off'\]"),
    ],
)
def test_other_settings_are_refused_and_named(tmp_path, other, named):
    RunState(tmp_path / "state.json", Options().fingerprint()).finish("world", {})
    with pytest.raises(ConfigError, match=named) as caught:
        RunState(tmp_path / "state.json", other.fingerprint())
    assert "--fresh" in str(caught.value)


def test_the_folder_is_no_setting(tmp_path):
    RunState(tmp_path / "state.json", Options(out=tmp_path).fingerprint()).finish("world", {})
    assert RunState(tmp_path / "state.json", Options(out=tmp_path / "..").fingerprint()).is_done("world")


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"version": 99, "settings": {}, "stages": {}})])
def test_a_state_that_cannot_be_read_is_no_empty_state(tmp_path, content):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(ConfigError, match="--fresh"):
        RunState(tmp_path / "state.json", Options().fingerprint())


def test_only_one_process_works_in_a_folder(tmp_path):
    lock = tmp_path / ".lock"
    with exclusive(lock), pytest.raises(ConfigError, match="another quickstart"), exclusive(lock):
        pass
    with exclusive(lock):
        pass


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"algo": "sac"}, "grpo, ppo, reinforce_pp"),
        ({"rl_steps": 0}, "--rl-steps"),
        ({"overrides": ("kl",)}, "key=value"),
    ],
)
def test_options_that_cannot_be_are_refused(given, named):
    with pytest.raises(ConfigError, match=named):
        Options(**given)
