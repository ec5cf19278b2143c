"""A judge that verl serves itself, in a resource pool of its own, while stock main_ppo trains."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.fakes.table_model import PLANNER, POSITIONS, write_table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JUDGE = {"assistant\n": {"0": 0.5, "1": 0.5}, "0": {"<|im_end|>": 1.0}, "1": {"<|im_end|>": 1.0}}


@pytest.fixture
def judge(untrained_world: Path, tmp_path: Path) -> str:
    return str(write_table(untrained_world / "model", tmp_path / "judge", JUDGE))


@pytest.fixture
def models(untrained_world: Path, tmp_path: Path, judge: str) -> list[str]:
    """Overrides that put the two models into the recipe."""
    planner = write_table(untrained_world / "model", tmp_path / "planner", PLANNER)
    return [f"actor_rollout_ref.model.path={planner}", f"reward.reward_model.model_path={judge}"]


HOSTED = [
    "judge=hosted",
    "data.max_response_length=128",
    "ray_kwargs.ray_init.num_gpus=2",  # one for the trainer, one for the judge
    "ray_kwargs.ray_init.num_cpus=16",
    f"reward.reward_model.rollout.max_model_len={POSITIONS}",
    "rltr.judge.no_call=ask",
    "rltr.judge.max_tokens=4",
    "rltr.judge.temperature=1",
]
VLLM = [
    "reward.reward_model.rollout.name=vllm",
    "reward.reward_model.rollout.max_num_seqs=16",
    f"reward.reward_model.rollout.max_num_batched_tokens={POSITIONS}",
    "+reward.reward_model.rollout.engine_kwargs.vllm.enable_sleep_mode=false",
    "rltr.judge.structured=choice",
]


def check(run, steps: list[dict], judge: str) -> None:
    """Two steps; each well-formed trajectory has three votes of the judge, they differ, and the planner learns."""
    assert [line["step"] for line in steps] == [1, 2]
    records = run.scored()
    assert len(records) == 16
    found = [record["terms"]["completeness"] for record in records if not record["format"]]
    assert len(found) > 8
    for term in found:
        assert term["judge"] == judge
        assert len(term["votes"]) == 3 and set(term["votes"]) <= {0, 1}
    assert len({term["value"] for term in found}) > 1
    assert any(record["metrics"]["calls"] for record in records)
    assert any(line["actor/grad_norm"] > 0 for line in steps)


def test_votes_come_from_the_model_that_verl_serves(run, models, judge):
    check(run, run.finish(*HOSTED, *models), judge)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; `make venv-vllm` installs it")
def test_votes_come_from_a_vllm_server_that_verl_starts(run, models, judge, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    check(run, run.finish(*HOSTED, *VLLM, *models), judge)
