"""verl's SFT trainer, unchanged, on the CPU: train, stop, resume, and read the model it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

pytestmark = pytest.mark.slow

#: What ``scale=cpu`` sets for the SFT trainer; the CPU engine needs no more.
OVERRIDES = ("trainer.device=cpu", "data.num_workers=1")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Sixteen two-turn conversations."""
    rows = [
        [{"role": "user", "content": f"{n} + 1 ="}, {"role": "assistant", "content": f"{n + 1}"}] for n in range(16)
    ]
    path = tmp_path / "train.parquet"
    pd.DataFrame({"messages": rows}).to_parquet(path)
    return path


def sft(model: str, data: Path, folder: Path, steps: int, log: str) -> list[dict]:
    """Run the trainer up to step ``steps``; return what it logged, a dict a step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    command += ["-m", "verl.trainer.sft_trainer", *OVERRIDES, f"model.path={model}", f"data.train_files={data}"]
    command += ["data.train_batch_size=4", "data.max_length=64", "optim.lr=1e-2", "trainer.total_epochs=10"]
    command += [f"trainer.total_training_steps={steps}", "trainer.save_freq=100", "trainer.logger=[console,file]"]
    command += [f"trainer.default_local_dir={folder}", "data.ignore_input_ids_mismatch=True"]
    command += ["checkpoint.save_contents=[model,optimizer,extra,hf_model]"]
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(folder.parent / log), "HYDRA_FULL_ERROR": "1"}
    done = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (folder.parent / log).read_text().splitlines()]


def test_five_steps_a_resumed_one_and_the_model_they_leave(tiny_model, data, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "checkpoints"
    first = sft(tiny_model, data, folder, steps=5, log="first.jsonl")
    losses = [row["data"]["train/loss"] for row in first if "train/loss" in row["data"]]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert all(0 < row["data"]["train/mfu"] < 1 for row in first if "train/mfu" in row["data"])

    resumed = sft(tiny_model, data, folder, steps=6, log="resumed.jsonl")
    assert [row["step"] for row in resumed if "train/loss" in row["data"]] == [6]

    model = AutoModelForCausalLM.from_pretrained(folder / "global_step_6" / "huggingface")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    start = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert not (model.model.norm.weight == start.model.norm.weight).all()
