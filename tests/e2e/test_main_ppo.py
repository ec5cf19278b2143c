"""verl's own trainer, unpatched, with this package plugged in: real processes, real updates, on the CPU."""

from __future__ import annotations

import os
import signal

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LOG_PROB_TOLERANCE = 1e-4


def check_steps(run, steps: list[dict], expected: int, rollouts: int) -> None:
    assert [line["step"] for line in steps] == list(range(1, expected + 1))
    for line in steps:
        assert line["training/rollout_probs_diff_max"] < LOG_PROB_TOLERANCE
    records = run.scored()
    assert len(records) == expected * rollouts
    assert len({frozenset(record["metrics"]) for record in records}) == 1
    assert all(record["trajectory"]["turns"] for record in records)


@pytest.mark.parametrize(("algo", "critic"), [("grpo", False), ("ppo", True), ("reinforce_pp", False)])
def test_two_steps_with_each_algorithm(run, algo, critic):
    steps = run.finish(f"algo={algo}")
    check_steps(run, steps, expected=2, rollouts=8)
    assert any(key.startswith("critic/vf_loss") for key in steps[-1]) == critic
    assert all(line["actor/grad_norm"] > 0 for line in steps)


def test_two_trainer_ranks_with_a_rollout_server_each(run):
    steps = run.finish("algo=grpo", "trainer.n_gpus_per_node=2")
    check_steps(run, steps, expected=2, rollouts=8)


def test_killed_and_resumed_from_its_last_checkpoint(run):
    options = ("algo=grpo", "trainer.save_freq=1", "trainer.total_training_steps=4")
    first = run.start(*options)
    try:
        run.wait_for_step(first, 2)
        os.killpg(first.pid, signal.SIGKILL)
    finally:
        run.kill(first)
    saved = int((run.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved >= 1
    run.metrics_file.unlink()
    steps = run.finish(*options)
    assert [line["step"] for line in steps] == list(range(saved + 1, 5))
    assert f"global_step_{saved}" in run.log()
