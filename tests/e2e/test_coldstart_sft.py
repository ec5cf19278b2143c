"""From SFT on two ranks to RL without a manual step, `rltr merge` on the same step, and the summarizer's recipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
from typer.testing import CliRunner

from rltr_verl.checkpoints import checkpoint_fix
from rltr_verl.cli.merge import merge
from rltr_verl.coldstart.conversations import summarizer_messages
from rltr_verl.data.prompt_files import load_summarizer_prompt
from rltr_verl.trajectory import Trajectory
from tests.fakes.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHORT = ("trainer.total_training_steps=4", "trainer.save_freq=2", "optim.lr_warmup_steps=1")


def sft(recipe: str, folder: Path, world: Path, *overrides: str, ranks: int = 1, nodes: int = 1) -> list[dict]:
    """Run verl's SFT trainer on the CPU; what it logged, a dict a step. Checkpoints are in ``folder``.

    Every "node" is a torchrun of its own that starts ``ranks`` processes.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous(nodes), f"--nproc_per_node={ranks}"]
    command = [*launcher, "-m", "verl.trainer.sft_trainer", "--config-name", recipe, "sft_scale=cpu", *SHORT]
    command += [f"rltr.world={world}", f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={ranks}"]
    command += [f"trainer.default_local_dir={folder}", "trainer.logger=[console,file]", *overrides]
    metrics, log = folder.with_suffix(".jsonl"), folder.with_suffix(".log")
    own = {"VERL_PLATFORM": "cpu", "VERL_FILE_LOGGER_PATH": str(metrics), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        options = {"env": {**os.environ, **own}, "stdout": output, "stderr": subprocess.STDOUT, "cwd": folder.parent}
        started = [subprocess.Popen(command, **options) for _ in range(nodes)]
        try:
            codes = [process.wait(400) for process in started]
        finally:
            for process in started:
                process.terminate()
    assert codes == [0] * nodes, log.read_text(errors="replace")[-4000:]
    lines = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def rendezvous(nodes: int) -> list[str]:
    """How torchruns find each other, as in docs/coldstart.md."""
    if nodes == 1:
        return ["--standalone"]
    return [f"--nnodes={nodes}", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_id=sft"]


def check_learned(steps: list[dict]) -> None:
    losses = [step["train/loss"] for step in steps]
    assert len(losses) == 4 and losses[-1] < losses[0] - 1


def load(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder).chat_template
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, untrained_world) -> tuple[list[dict], Path]:
    """Steps and the last checkpoint of a cold start on two gloo ranks."""
    folder = tmp_path_factory.mktemp("sft") / "coldstart"
    steps = sft("rltr_coldstart_sft", folder, untrained_world, ranks=2)
    return steps, folder / "global_step_4"


def test_two_ranks_learn_and_leave_a_model(trained, untrained_world):
    steps, checkpoint = trained
    check_learned(steps)
    assert len(list(checkpoint.glob("model_world_size_2_rank_*.pt"))) == 2
    model, start = load(checkpoint / "huggingface"), load(untrained_world / "model")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    moved = [not torch.equal(model.state_dict()[name], value) for name, value in start.state_dict().items()]
    assert all(moved)


def test_rl_starts_from_what_sft_left(trained, run):
    checkpoint = trained[1]
    steps = run.finish(
        "algo=grpo", "trainer.total_training_steps=1", f"actor_rollout_ref.model.path={checkpoint}/huggingface"
    )
    assert [step["step"] for step in steps] == [1]
    assert steps[0]["training/rollout_probs_diff_max"] < 1e-4
    assert len(run.scored()) == 8


def test_the_step_itself_given_as_a_model_is_answered_with_its_folder(trained):
    assert f"use {trained[1]}/huggingface" in checkpoint_fix(trained[1])


@pytest.fixture
def sharded(trained, tmp_path) -> Path:
    """The run's folder as it is without ``hf_model``: the same shards, and settings without weights."""
    folder = tmp_path / "run"
    shutil.copytree(trained[1].parent, folder)
    for weights in folder.rglob("model.safetensors"):
        weights.unlink()
    return folder


def run_merge(*arguments: object):
    app = typer.Typer()
    app.command()(merge)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_merged_shards_are_the_whole_model_in_bfloat16(trained, sharded, tmp_path):
    done = run_merge(sharded, "--out", tmp_path / "merged")
    assert done.exit_code == 0, done.output
    assert f"{sharded}/global_step_4: 2 fsdp shards" in done.stdout
    assert f"actor_rollout_ref.model.path={tmp_path}/merged" in done.stdout
    whole, merged = (load(folder).state_dict() for folder in (trained[1] / "huggingface", tmp_path / "merged"))
    assert whole.keys() == merged.keys()
    for name, weight in whole.items():
        assert merged[name].dtype == torch.bfloat16 and torch.equal(merged[name], weight.bfloat16()), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "run"]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "merged" / name).read_bytes() == (trained[1] / "huggingface" / name).read_bytes()


def test_what_is_whole_already_is_not_merged(trained, tmp_path):
    done = run_merge(trained[1].parent, "--out", tmp_path / "merged")
    assert done.exit_code == 2 and f"use {trained[1]}/huggingface" in done.output.replace("\n", "")
    assert not (tmp_path / "merged").exists()


def test_lora_leaves_shards_that_merge_into_base_and_adapter(untrained_world, tmp_path):
    from peft import PeftModel

    lora = ("model.lora_rank=4", "model.target_modules=[q_proj,v_proj]", "trainer.total_training_steps=2")
    sharded = "checkpoint.save_contents=[model,optimizer,extra]"
    sft("rltr_coldstart_sft", tmp_path / "run", untrained_world, *lora, sharded)
    done = run_merge(tmp_path / "run", "--out", tmp_path / "merged")
    assert done.exit_code == 0, done.output
    adapter = tmp_path / "merged" / "lora_adapter"
    named = f"lora_adapter_path={adapter} actor_rollout_ref.model.lora_rank=4"
    assert f"actor_rollout_ref.model.path={tmp_path}/merged actor_rollout_ref.model.{named}" in done.stdout
    base, start = load(tmp_path / "merged"), load(untrained_world / "model").state_dict()
    assert all(torch.equal(weight, start[name].bfloat16()) for name, weight in base.state_dict().items())
    adapted = PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()
    changed = {name for name, weight in adapted.items() if not torch.equal(weight, start[name].bfloat16())}
    assert changed and all("q_proj" in name or "v_proj" in name for name in changed)


def summaries(world: Path, path: Path) -> Path:
    """Rows as `rltr coldstart export` writes them: the summarizer's prompt, then the answer."""
    rows = []
    for row in pq.read_table(world / "coldstart.parquet").slice(0, 48).to_pylist():
        trajectory = Trajectory.from_messages(row["messages"])
        asked = summarizer_messages(trajectory, load_summarizer_prompt("en"), max_chars=4000)
        seen = [result.text for turn in trajectory.turns for result in turn.observations]
        rows.append([*asked, {"role": "assistant", "content": seen[-1] if seen else "1"}])
    pq.write_table(pa.table({"messages": rows}), path)
    return path


def test_the_summarizers_recipe_on_two_nodes_with_a_copy_of_the_weights_on_each(untrained_world, tmp_path):
    data = summaries(untrained_world, tmp_path / "summarizer.parquet")
    given = (
        f"data.train_files={data}",
        "engine.fsdp_size=1",
    )  # as sft_scale=*_2nodes: as many shards as a node has ranks
    steps = sft("rltr_summarizer_sft", tmp_path / "out", untrained_world, *given, nodes=2)
    check_learned(steps)
    step = tmp_path / "out" / "global_step_4"
    assert len(list(step.glob("model_world_size_2_rank_*.pt"))) == 2
    load(step / "huggingface")
