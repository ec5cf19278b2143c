"""Rollouts without verl: repeatable, in order, and loud when the engine fails."""

from __future__ import annotations

import pytest
import torch

from rltr_verl.config import RltrSettings
from rltr_verl.errors import ModelError, RltrError
from rltr_verl.rollout.generation import Engine
from rltr_verl.rollout.local import LocalModel, LocalSampling
from rltr_verl.world import WorldSizes, build_world

SETTINGS = RltrSettings.model_validate({"tools": ["calculator"], "rollout": {"max_turns": 3}})
ROWS = [
    {"prompt": [{"role": "user", "content": text}], "extra_info": {"query": text}}
    for text in ("What is 41 - 12?", "Good morning, Ada!", "Compute 11 + 12.")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = WorldSizes(train=100, val=20, val_unseen=10, coldstart=100)
    return build_world(tmp_path_factory.mktemp("local") / "world", sizes=sizes).model


@pytest.fixture(scope="module")
def model(folder):
    return LocalModel(folder, SETTINGS)


def texts(trajectories):
    return [[turn.text for turn in trajectory.turns] for trajectory in trajectories]


def test_trajectories_come_in_the_order_of_the_rows(model):
    done = []
    found = model.roll_out(ROWS, LocalSampling(1.0, max_tokens=20), lambda: done.append(1))
    assert [trajectory.query for trajectory in found] == [row["extra_info"]["query"] for row in ROWS]
    assert len(done) == 3
    assert all(trajectory.turns and trajectory.tools for trajectory in found)


def test_the_seed_decides_what_is_sampled(model):
    one, same, other = (model.roll_out(ROWS, LocalSampling(1.0, seed=seed, max_tokens=20)) for seed in (1, 1, 2))
    assert texts(one) == texts(same) != texts(other)


def test_no_rows_give_no_trajectories(model):
    assert model.roll_out([]) == []


def test_an_engine_that_fails_is_an_error_and_no_hang(model, monkeypatch):
    step = Engine.step

    def broken(self: Engine) -> int:
        if "row 1" in self.request_ids:  # the engine's check of itself passes, then it breaks
            raise RuntimeError("out of memory")
        return step(self)

    monkeypatch.setattr(Engine, "step", broken)
    with pytest.raises(RltrError, match="the engine ended early") as caught:
        model.roll_out(ROWS)
    assert "out of memory" in str(caught.value.__cause__)


def test_a_model_of_nans_is_refused(folder):
    broken = LocalModel(folder, SETTINGS)
    with torch.no_grad():
        broken._model.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(RltrError):
        broken.roll_out(ROWS)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=f"{tmp_path}: no model here"):
        LocalModel(tmp_path, SETTINGS)
