"""Two gloo ranks: sharded training equals training on one, weights gather, checkpoints restore."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("two_ranks.py")


def run(ranks: int, model: str, checkpoint: Path) -> dict:
    """Run the script on this many ranks; return its report."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    environment = {**os.environ, "RLTR_CPU_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, SCRIPT, model, checkpoint], env=environment, capture_output=True, text=True, timeout=500
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert done.returncode == 0 and lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("REPORT "))


@pytest.fixture(scope="module")
def reports(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, Path]:
    """Reports of a run on one rank and of a run on two, and the checkpoint of the second."""
    folder = tmp_path_factory.mktemp("ranks")
    return run(1, tiny_model, folder / "one"), run(2, tiny_model, folder / "two"), folder / "two"


def test_parameters_are_sharded(reports):
    one, two, _ = reports
    assert (one["world_size"], two["world_size"]) == (1, 2)
    assert one["local_share"] == 1
    assert two["local_share"] == pytest.approx(0.5, abs=0.02)


def test_two_ranks_learn_what_one_does(reports):
    one, two, _ = reports
    assert two["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two["losses"][-1] < two["losses"][0]


def test_gathered_weights_are_the_same_on_both(reports):
    assert reports[1]["ranks_agree"]


def test_a_checkpoint_restores_and_training_goes_on_as_before(reports):
    for report in reports[:2]:
        assert report["restored"]
        assert report["continued"] < 1e-6


def test_reference_and_critic_answer_for_their_rows(reports):
    assert (reports[1]["reference_rows"], reports[1]["critic_rows"]) == (2, 2)


def test_the_saved_folder_is_a_plain_model(reports, tiny_model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = reports[2] / "huggingface"
    trained = AutoModelForCausalLM.from_pretrained(folder)
    start = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert trained.dtype == torch.float32
    assert not (trained.model.norm.weight == start.model.norm.weight).all()
    assert AutoTokenizer.from_pretrained(folder).chat_template
