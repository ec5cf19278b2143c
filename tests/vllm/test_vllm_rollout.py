"""Stock ``main_ppo`` with vLLM rolling out and a second vLLM as the judge, without a GPU: `make test-vllm`."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rltr_verl.world import World
from tests.e2e.conftest import Run
from tests.fakes.table_model import PLANNER, write_table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; `make venv-vllm` installs it"),
]

BOUND = 1e-4
"""Largest difference of a token's probability between vLLM and the trainer, both in fp32."""


@dataclass(frozen=True)
class Trained:
    """Three steps of ``main_ppo``: metrics of each, and every scored trajectory."""

    steps: list[dict[str, Any]]
    records: list[dict[str, Any]]

    @property
    def turns(self) -> list[dict[str, Any]]:
        return [turn for record in self.records for turn in record["trajectory"]["turns"]]


@pytest.fixture(scope="module")
def trained(world: World, server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    run = Run(tmp_path_factory.mktemp("run"), Path(world.folder))
    planner = write_table(Path(world.model), tmp_path_factory.mktemp("planner") / "model", PLANNER)
    judge = [
        "judge=endpoint",
        f"rltr.judge.base_url={server}",
        "rltr.judge.model=judge",
        "rltr.judge.structured=choice",
    ]
    steps = run.finish(
        "rollout_engine=vllm",
        *judge,
        f"actor_rollout_ref.model.path={planner}",
        "data.max_response_length=128",
        "trainer.total_training_steps=3",
        "rltr.judge.temperature=1",
        timeout=600,
    )
    yield Trained(steps, run.scored())
    shutil.rmtree(run.ray, ignore_errors=True)


def test_every_step_trains_on_vllms_own_log_probs(trained: Trained, record_property):
    assert [line["step"] for line in trained.steps] == [1, 2, 3]
    found = [line["training/rollout_probs_diff_max"] for line in trained.steps]
    record_property("probs", found)
    assert max(found) < BOUND  # over every trained token; one of an observation would be near 1
    assert all(line["actor/grad_norm"] > 0 for line in trained.steps)


def test_weights_that_stayed_behind_would_be_seen(trained: Trained):
    """Already the second step's log-probs have left the first weights by far more than the bound."""
    moved = [math.sqrt(2 * line["actor/kl_loss"]) for line in trained.steps[1:]]
    assert min(moved) > 10 * BOUND


def test_turns_stop_at_the_marker_and_keep_it(trained: Trained):
    answers = [turn["text"] for turn in trained.turns if "<answer>" in turn["text"]]
    assert answers and all(text.endswith("<answer>") and text.count("<answer>") == 1 for text in answers)


def test_calls_are_run_and_the_planner_goes_on_behind_their_results(trained: Trained):
    calling = [record["trajectory"]["turns"] for record in trained.records if record["metrics"]["calls"]]
    assert any(len(turns) > 1 and turns[-1]["text"].endswith("<answer>") for turns in calling)
    shown = [seen for turns in calling for turn in turns for seen in turn["observations"]]
    assert shown and any(seen["status"] == "ok" and seen["text"] for seen in shown)


def test_the_judge_is_a_second_vllm(trained: Trained):
    found = [record["terms"]["completeness"] for record in trained.records if not record["format"]]
    asked = [term for term in found if term["judge_votes"]]  # the others gathered nothing
    assert asked and {term["judge"] for term in asked} == {"judge"}
    assert all(len(term["votes"]) == 3 and set(term["votes"]) <= {0, 1} for term in asked)
