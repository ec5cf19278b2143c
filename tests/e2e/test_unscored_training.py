"""Stock main_ppo with a judge that fails for some trajectories, and with one that fails for all.

The planner's weights are set by hand, so that it calls and stops without having been trained.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.openai_server import FakeServer, Reply
from tests.fakes.table_model import PLANNER, write_table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DOWN = Reply(status=503, body="the judge is overloaded")
SETTINGS = [
    "judge=endpoint",
    "rltr.judge.model=fake",
    "rltr.judge.n_votes=1",
    "rltr.judge.min_votes=1",
    "rltr.judge.retries=1",
    "rltr.judge.rest_s=0",
    "rltr.judge.no_call=ask",
    "data.train_batch_size=4",
    "data.max_response_length=128",
]


@pytest.fixture
def planner(untrained_world: Path, tmp_path: Path) -> str:
    return f"actor_rollout_ref.model.path={write_table(untrained_world / 'model', tmp_path / 'planner', PLANNER)}"


def three_of_ten_fail(number: int, payload: dict[str, Any]) -> Reply:
    """A trajectory's fate hangs on its record alone, so it is the same for every vote and every try."""
    record = re.sub(r"[0-9a-f]{24}", "", payload["messages"][-1]["content"])  # but for the delimiter's token
    fate = hashlib.sha256(record.encode()).digest()
    return DOWN if fate[0] % 10 < 3 else Reply(f"Score: {fate[1] % 2}")


def key_of(record: dict[str, Any]) -> str:
    """The key of the row in verl's queue."""
    return f"{record['uid']}_{record['session_id']}_0"


def trained(run, step: int) -> dict[str, float]:
    """Reward by key of the rows that verl trained on, as verl itself wrote them down; its padding left out."""
    lines = (run.folder / "trained" / f"{step}.jsonl").read_text().splitlines()
    rows = {row["uid"]: row["score"] for row in map(json.loads, lines)}
    return {key: score for key, score in rows.items() if not key.startswith("pad")}


def groups_of(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Totals of the scored trajectories, by prompt and key."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for record in records:
        if record["total"] is not None:
            groups[record["uid"]][key_of(record)] = record["total"]
    return groups


def check_step(run, line: dict[str, Any], records: list[dict[str, Any]], algo: str) -> None:
    groups = groups_of(records)
    if algo == "grpo":
        groups = {uid: rewards for uid, rewards in groups.items() if len(rewards) > 1}
        advantages = [one for rewards in groups.values() for one in grpo(list(rewards.values()))]
        assert line["critic/advantages/max"] == pytest.approx(max(advantages), abs=1e-3)
        assert line["critic/advantages/min"] == pytest.approx(min(advantages), abs=1e-3)
    expected = {key: total for rewards in groups.values() for key, total in rewards.items()}
    assert trained(run, line["step"]) == pytest.approx(expected)
    assert line["critic/score/mean"] == pytest.approx(statistics.mean(expected.values()), abs=1e-4)
    unscored = sum(record["total"] is None for record in records)
    assert len(records) == 16 and line["training/unscored"] == unscored
    assert line["training/unscored_share"] == unscored / 16


def grpo(rewards: list[float]) -> list[float]:
    """Advantages among the scored peers only."""
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def check_validation(line: dict[str, Any], records: list[dict[str, Any]]) -> None:
    sources = {record["data_source"] for record in records}
    for source in sources:
        own = [record for record in records if record["data_source"] == source]
        scored = [record["metrics"]["acc"] for record in own if record["total"] is not None]
        if scored:
            assert line[f"val-core/{source}/acc/mean@1"] == pytest.approx(statistics.mean(scored))
        assert line[f"val-aux/{source}/unscored/mean@1"] == pytest.approx(1 - len(scored) / len(own))


@pytest.mark.parametrize("algo", ["grpo", "ppo", "reinforce_pp"])
async def test_a_judge_that_fails_for_some(run, planner, algo):
    options = [
        *SETTINGS,
        planner,
        f"algo={algo}",
        "rltr.judge.max_unscored_share=0.9",
        f"trainer.rollout_data_dir={run.folder}/trained",
        "trainer.test_freq=2",
        "data.val_max_samples=16",
    ]
    async with FakeServer(three_of_ten_fail) as server:
        steps = await asyncio.to_thread(run.finish, *options, f"rltr.judge.base_url={server.url}")
    records = run.scored()
    training = [record for record in records if record["split"] == "train"]
    assert any(record["total"] is None for record in training)
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        check_step(run, line, [record for record in training if record["global_steps"] == line["step"]], algo)
        assert line["actor/grad_norm"] > 0
    check_validation(steps[-1], [record for record in records if record["split"] != "train"])


async def test_a_judge_that_fails_for_all_stops_training_and_is_named(run, planner):
    options = [*SETTINGS, planner]
    async with FakeServer(DOWN) as server:
        process = run.start(*options, f"rltr.judge.base_url={server.url}")
        try:
            code = await asyncio.to_thread(process.wait, 300)
        finally:
            run.kill(process)
    log = run.log()
    assert code != 0 and not run.metrics()
    (said,) = {line for line in log.splitlines() if line.startswith("rltr_verl.") and "JudgeOutage" in line}
    assert f"judge {server.url} (model fake)" in said and "trajectories of step 1 are unscored" in said
    assert "HTTP 503" in said and "Fix: " in said
