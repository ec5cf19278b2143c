"""The gate on real small models: one that has learned its queries, one that has learned nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltr_verl.config import RltrSettings
from rltr_verl.errors import GateError
from rltr_verl.quickstart import stages
from rltr_verl.quickstart.evaluation import evaluate, read_rows, summarize
from rltr_verl.quickstart.gate import GateFigures, measure
from rltr_verl.quickstart.options import GateLimits, Options, Paths
from rltr_verl.quickstart.state import RunState
from rltr_verl.rollout.local import LocalModel, LocalSampling
from rltr_verl.rollout.sft_prompts import check_prompts
from rltr_verl.scoring import Scorer
from rltr_verl.tooling import schemas
from rltr_verl.world import WorldSizes, build_world
from rltr_verl.world.build import TOOL_NAMES, load_world_tools
from rltr_verl.world.policies import Oracle, play

SMALL = WorldSizes(train=100, val=40, val_unseen=14, coldstart=100)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_world(tmp_path_factory.mktemp("gate") / "world", seed=1, sizes=SMALL)


@pytest.fixture(scope="module")
def rows(world):
    """Six queries, most of which need two calls or more."""
    return sorted(read_rows(world.split("val")), key=lambda row: row["extra_info"]["kind"] in ("look", "none", "calc"))[
        :6
    ]


@pytest.fixture(scope="module")
def settings(world):
    values = {"tools": list(TOOL_NAMES), "tool_settings": {"search": {"corpus": str(world.corpus)}}}
    return RltrSettings.model_validate(values)


@pytest.fixture(scope="module")
def healthy(world, rows, settings, tmp_path_factory):
    """The world's model, fitted to the right trajectories of the queries."""
    tools = load_world_tools(world.corpus)
    calls = {name: tool.call for name, tool in tools.items()}
    data = tmp_path_factory.mktemp("fit") / "right.parquet"
    conversations = [{"messages": play(Oracle(), row, calls), "tools": schemas(tools)} for row in rows]
    pq.write_table(pa.Table.from_pylist(conversations), data)
    folder = tmp_path_factory.mktemp("healthy")
    _fit(world.model, data, folder)
    return LocalModel(folder, settings)


def _fit(start: Path, data: Path, folder: Path, steps: int = 120) -> None:
    """Fit the model to the conversations as verl's SFT sees them, until it knows them by heart."""
    from rltr_verl.rollout.sft_dataset import PlannerSFTDataset

    tokenizer, model = AutoTokenizer.from_pretrained(start), AutoModelForCausalLM.from_pretrained(start)
    config = OmegaConf.create({"pad_mode": "right", "max_length": 320, "truncation": "error"})
    items = [item for item in PlannerSFTDataset([str(data)], tokenizer, config)]
    ids, masks = (torch.stack([item[key] for item in items]) for key in ("input_ids", "loss_mask"))
    attention = torch.stack([item["attention_mask"] for item in items])
    labels = ids.masked_fill(masks == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    for _ in range(steps):
        loss = model(input_ids=ids, attention_mask=attention, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.003:
            break
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_healthy_cold_start_passes(healthy, settings, world, rows):
    done = []
    figures = measure(healthy, Scorer(settings), world.coldstart, rows, LocalSampling(1.0), lambda: done.append(1))
    assert figures.passes(GateLimits())
    assert figures.format_ok > 0.95 and figures.multi_call > 0.8
    assert figures.n_prompts >= 16
    assert len(done) == 2 * len(rows)


def test_an_untrained_model_does_not_pass(settings, world, rows):
    untrained = LocalModel(world.model, settings)
    figures = measure(untrained, Scorer(settings), world.coldstart, rows, LocalSampling(1.0, max_tokens=64))
    assert not figures.passes(GateLimits())
    assert figures.multi_call == 0.0


def test_greedy_evaluation_is_repeatable_and_counts_per_kind(healthy, settings, rows):
    first, second = (evaluate(healthy, Scorer(settings), rows, LocalSampling()) for _ in range(2))
    assert [item.trajectory.turns for item in first] != []
    assert [[turn.text for turn in item.trajectory.turns] for item in first] == [
        [turn.text for turn in item.trajectory.turns] for item in second
    ]
    summary = summarize(first)
    assert summary["n"] == len(rows) == sum(kind["n"] for kind in summary["kinds"].values())
    assert summary["completeness"] == pytest.approx(1.0)
    plans = [len(json.loads(row["extra_info"]["plan"])) for row in rows]
    assert summary["calls"] == pytest.approx(sum(plans) / len(rows))


def test_prompts_are_equal_for_the_worlds_own_data(settings, world):
    model = LocalModel(world.model, settings)
    assert check_prompts(world.coldstart, model.tokenizer, model.planner, rows=24) > 24


def _without_calculator(conversation: dict) -> None:
    tools = [tool for tool in json.loads(conversation["tools"]) if tool["function"]["name"] != "calculator"]
    conversation["tools"] = json.dumps(tools)


def _results_as_user_messages(conversation: dict) -> None:
    for message in conversation["messages"]:
        message["role"] = "user" if message["role"] == "tool" else message["role"]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_without_calculator, r"row 0, turn 0: .*differs .* at token \d+"),
        (_results_as_user_messages, r"row \d+: a message of role 'user' follows .* role 'tool'"),
    ],
)
def test_sft_prompts_that_differ_are_refused_whatever_the_model_can_do(
    healthy, settings, world, rows, tmp_path, spoil, named
):
    conversations = pq.read_table(world.coldstart).to_pylist()
    for conversation in conversations:
        spoil(conversation)
    pq.write_table(pa.Table.from_pylist(conversations), tmp_path / "bad.parquet")
    with pytest.raises(GateError, match=named):
        measure(healthy, Scorer(settings), tmp_path / "bad.parquet", rows, LocalSampling(1.0))


class Scripted:
    """Stands in for SFT and measurement: what each attempt reaches."""

    def __init__(self, monkeypatch, reached: list[float]) -> None:
        self.trained: list[int] = []
        monkeypatch.setattr(stages, "_train_sft", self.train)
        monkeypatch.setattr(stages.gates, "measure", lambda *_: GateFigures(1.0, reached[len(self.trained) - 1], 16))

    def train(self, run, steps: int) -> dict:
        self.trained.append(steps)
        return {"steps": steps, "model": "world/model"}


@pytest.fixture
def run(world, settings, tmp_path):
    (tmp_path / "world").symlink_to(world.folder)
    options = Options(out=tmp_path, sft_steps=100, gate=GateLimits(more_steps=50, attempts=2))
    paths = Paths(tmp_path)
    config = OmegaConf.create({"data": {"max_response_length": 64}})
    state = RunState(paths.state, options.fingerprint())
    return stages.Run(options, paths, state, Console(file=io.StringIO()), config, settings)


def test_a_short_cold_start_is_trained_further_until_it_passes(run, monkeypatch):
    script = Scripted(monkeypatch, [0.0, 0.2])
    assert stages.gate(run)["steps"] == 150
    assert script.trained == [100, 150]


def test_after_the_last_attempt_the_error_says_what_to_do(run, monkeypatch):
    script = Scripted(monkeypatch, [0.0, 0.01, 0.05])
    with pytest.raises(GateError, match=r"after 200 steps.*0\.05 \(needed 0\.10\).*--seed"):
        stages.gate(run)
    assert script.trained == [100, 150, 200]


def test_an_interrupted_gate_goes_on_with_the_steps_it_had_decided_on(run, monkeypatch):
    run.state.note("gate", extra=1)
    script = Scripted(monkeypatch, [0.5])
    assert stages.gate(run)["steps"] == 150
    assert script.trained == [150]
