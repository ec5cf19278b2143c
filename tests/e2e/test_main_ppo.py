"""verl's own trainer, unpatched, with this package plugged in: real processes, real updates, on the CPU."""

from __future__ import annotations

import os
import re
import signal

import pytest
from typer.testing import CliRunner

from rltr_verl.cli.main import app

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
    assert re.search(r"masks of the first batch: 8 trajectories, \d+ trained tokens, ok", run.log())
    checked = CliRunner().invoke(app, ["verify-masks", str(run.dump), "--model", str(run.world / "model")])
    assert checked.exit_code == 0 and "exactly the sampled tokens are trained" in checked.output, checked.output


BROKEN_LOOP = """
from rltr_verl.rollout.planner_loop import PlannerLoop


class BrokenLoop(PlannerLoop):
    def _output(self, *args, **kwargs):
        output = super()._output(*args, **kwargs)
        output.response_mask = [1 - value for value in output.response_mask]
        return output
"""


def test_a_wrong_mask_stops_the_run_before_anything_is_updated(run, monkeypatch):
    (run.folder / "broken_loop.py").write_text(BROKEN_LOOP)
    loops = run.folder / "loops.yaml"
    loops.write_text("- {name: rltr_planner, _target_: broken_loop.BrokenLoop}\n")
    monkeypatch.setenv("PYTHONPATH", str(run.folder))
    process = run.start("algo=grpo", f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}")
    try:
        assert process.wait(400) != 0
    finally:
        run.kill(process)
    assert re.search(r"MaskError: masks of the first batch: trajectory \S+_0: turn 0, token 0: .*Fix: ", run.log())
    assert run.metrics() == []


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
