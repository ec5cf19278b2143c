"""Unscored trajectories between the reward manager and the loss: the real queue, buffers and advantages of verl.

The trainer is reduced to what builds its buffer and computes its advantages; rows are put where the rollout puts them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl import DataProto
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.utils import MetricsAggregator, compute_advantage_for_multi_trajectories
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rltr_verl.errors import JudgeOutage, RolloutError
from rltr_verl.rollout.sampler import is_group_relative
from rltr_verl.rollout.unscored import Ledger, Missing, Tally, report

OURS = {"path": "pkg://rltr_verl.rollout.sampler", "name": "build_sampler"}
VERLS = {"path": None, "name": None}
DOWN = "0 of 3 votes are readable (HTTP 503)"
WITHOUT_GROUPS = {"gae", "reinforce_plus_plus", "remax"}
LENGTH = 4
UIDS = (f"prompt{number}" for number in count())


class Trainer:
    """The parts of verl's trainer that build its buffer and compute its advantages."""

    _build_replay_buffer = PPOTrainer._build_replay_buffer
    _resolve_filter_groups_metric = PPOTrainer._resolve_filter_groups_metric
    _compute_advantage = PPOTrainer._compute_advantage

    def __init__(self, mode: str = "sync", sampler: dict = OURS, estimator: str = "grpo", **changes: Any) -> None:
        self.trainer_mode, self.refilled = mode, 0
        self.config = OmegaConf.create(
            {
                "trainer": {
                    "v1": {
                        "sampler": {
                            "custom_sampler": sampler,
                            "max_off_policy_threshold": 8,
                            "max_off_policy_strategy": "drop",
                            "sampler_kwargs": {},
                            "sync_refill_failed_groups": False,
                        }
                    }
                },
                "data": {"train_batch_size": 2},
                "actor_rollout_ref": {"rollout": {"n": 4}},
                "algorithm": {
                    "adv_estimator": estimator,
                    "gamma": 1.0,
                    "lam": 1.0,
                    "use_kl_in_reward": False,
                    "norm_adv_by_std_in_grpo": True,
                },
                "reward": {"reward_model": {"enable": False}},
                "rltr": {
                    "judge": {
                        "backend": "endpoint",
                        "base_url": "http://judge:8000/v1",
                        "model": "m",
                        "max_unscored_share": 0.5,
                    }
                },
            }
        )
        for key, value in changes.items():
            OmegaConf.update(self.config, key.replace("__", "."), value)
        self.buffer = self._build_replay_buffer()

    def _add_prompts_to_generate(self, number: int) -> None:
        """What refills do in these tests: the judge fails in the same way again."""
        self.refilled += number
        assert self.refilled < 1000, "groups are replaced without end"
        for _ in range(number):
            group([None] * 4)

    def sample(self, groups: int, partition: str = "train") -> tuple[Any, dict]:
        return self.buffer.sample(global_steps=1, partition_id=partition, batch_size=groups)


def row(uid: str, session: int, reward: float) -> dict[str, Any]:
    ones = torch.ones(LENGTH, dtype=torch.int64)
    rewards = torch.zeros(LENGTH)
    rewards[-1] = reward
    return {
        "uid": uid,
        "session_id": session,
        "prompts": ones,
        "responses": ones,
        "response_mask": ones,
        "input_ids": torch.cat([ones, ones]),
        "position_ids": torch.arange(2 * LENGTH),
        "rm_scores": rewards,
        "rollout_log_probs": torch.zeros(LENGTH),
        "values": torch.linspace(0, reward, LENGTH),
    }


def group(
    rewards: Sequence[float | None], partition: str = "train", reason: str | None = DOWN, by_judge: bool = True
) -> str:
    """A prompt whose sessions ended; None is one without a score, because of ``reason`` or of something else."""
    uid = next(UIDS)
    scored = {session: reward for session, reward in enumerate(rewards) if reward is not None}
    for session in range(len(rewards)):
        if session not in scored and reason:
            asyncio.run(report(uid, session, Missing(reason, by_judge)))
    status = "finished" if len(scored) == len(rewards) else "failure"
    tq.kv_put(key=uid, partition_id=partition, tag={"is_prompt": True, "status": status, "global_steps": 1})
    if scored:
        tq.kv_batch_put(
            keys=[f"{uid}_{session}_0" for session in scored],
            partition_id=partition,
            fields=list_of_dict_to_tensordict([row(uid, session, reward) for session, reward in scored.items()]),
            tags=[{"status": "success", "global_steps": 1, "seq_len": 2 * LENGTH} for _ in scored],
        )
    return uid


def keys(uid: str, *sessions: int) -> set[str]:
    return {f"{uid}_{session}_0" for session in sessions}


@pytest.fixture(scope="module")
def ray_and_queue() -> Iterator[None]:
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level="error", log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()
    ray.shutdown()


@pytest.fixture
def queue(ray_and_queue: None) -> Iterator[None]:
    """An empty queue."""
    yield
    for partition, items in (tq.kv_list() or {}).items():
        if items:
            tq.kv_clear(keys=list(items), partition_id=partition)
    _end_ledger()


def _end_ledger() -> None:
    """So that the next test does not meet this one's, dying: a run has one for its whole length."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            ray.kill(ray.get_actor("rltr_unscored"))
        except ValueError:
            return
        time.sleep(0.1)


def advantages(trainer: Trainer, batch: Any) -> dict[str, list[float]]:
    """Per row what verl's trainer computes of a sampled batch, padded as its trainer pads it."""
    padded = upsample_batch_to_divisible_size(batch, 8, eos_token_id=0)
    done = trainer._compute_advantage(padded, {})
    data = tq.kv_batch_get(keys=done.keys, partition_id="train", select_fields=["advantages", "response_mask"])
    padding = [number for number, key in enumerate(done.keys) if key.startswith("pad")]
    assert not any(data["response_mask"][number].any() for number in padding), "padding would enter the loss"
    rows = dict(zip(done.keys, (value.tolist() for value in data["advantages"]), strict=True))
    return {key: value for key, value in rows.items() if not key.startswith("pad")}


def as_if_smaller(trainer: Trainer, groups: dict[str, dict[int, float]]) -> dict[str, list[float]]:
    """What verl's estimator makes of these rows alone, with no session that failed ever having been there."""
    rows = [row(uid, session, reward) for uid, rewards in groups.items() for session, reward in rewards.items()]
    names = [f"{item['uid']}_{item['session_id']}_0" for item in rows]
    data = DataProto.from_dict(
        tensors={name: torch.stack([item[name] for item in rows]) for name in ("response_mask", "rm_scores", "values")},
        non_tensors={"uid": np.array([item["uid"] for item in rows], dtype=object)},
    )
    data.batch["token_level_rewards"] = data.batch["rm_scores"]
    algorithm = trainer.config.algorithm
    done = compute_advantage_for_multi_trajectories(
        data, batch_keys=names, adv_estimator=algorithm.adv_estimator, num_repeat=4, config=algorithm
    )
    return dict(zip(names, done.batch["advantages"].tolist(), strict=True))


@pytest.mark.parametrize("estimator", ["grpo", "gae", "reinforce_plus_plus", "rloo"])
def test_the_peers_train_as_if_the_unscored_had_never_been(queue, estimator):
    trainer = Trainer(estimator=estimator)
    first, second = group([1.0, None, 0.0, 0.5]), group([0.0, 1.0, 1.0, None])
    batch, metrics = trainer.sample(2)
    assert set(batch.keys) == keys(first, 0, 2, 3) | keys(second, 0, 1, 2)
    assert metrics["training/unscored"] == 2 and metrics["training/unscored_share"] == 0.25
    expected = as_if_smaller(trainer, {first: {0: 1.0, 2: 0.0, 3: 0.5}, second: {0: 0.0, 1: 1.0, 2: 1.0}})
    found = advantages(trainer, batch)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, abs=1e-5)


def test_the_grpo_baseline_is_the_mean_and_deviation_of_the_scored_peers(queue):
    trainer = Trainer()
    uid = group([1.0, None, 0.0, 0.5])
    group([0.0, 1.0, 1.0, 0.0])
    found = advantages(trainer, trainer.sample(2)[0])
    for session, reward in {0: 1.0, 2: 0.0, 3: 0.5}.items():
        advantage = (reward - 0.5) / (np.std([1.0, 0.0, 0.5], ddof=1) + 1e-6)
        assert found[f"{uid}_{session}_0"] == pytest.approx([advantage] * LENGTH, abs=1e-5)


def test_which_estimators_compare_within_a_group():
    found = {str(getattr(name, "value", name)) for name in ADV_ESTIMATOR_REGISTRY}
    assert {name for name in found if not is_group_relative(name)} == WITHOUT_GROUPS
    assert {"grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"} <= found - WITHOUT_GROUPS


def test_verls_own_buffer_would_train_a_lone_trajectory_on_its_raw_reward(queue):
    """The trap that the next test is about; if verl closes it, ours can go."""
    trainer = Trainer(sampler=VERLS)
    lone = group([0.75, None, None, None])
    group([0.0, 1.0, 1.0, 0.0])
    found = advantages(trainer, trainer.sample(2)[0])
    assert found[f"{lone}_0_0"] == pytest.approx([0.75] * LENGTH, abs=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"])
def test_a_lone_trajectory_is_left_out_where_groups_are_compared(queue, estimator):
    trainer = Trainer(estimator=estimator)
    lone, whole = group([1.0, None, None, None]), group([0.0, 1.0, 1.0, 0.0])
    batch, metrics = trainer.sample(2)
    assert set(batch.keys) == keys(whole, 0, 1, 2, 3)
    assert metrics["training/lone_groups"] == 1
    left = tq.kv_list("train")["train"]
    assert not any(key.startswith(lone) for key in left), "its row stays in the queue"


@pytest.mark.parametrize("estimator", sorted(WITHOUT_GROUPS))
def test_a_lone_trajectory_trains_where_groups_do_not_matter(queue, estimator):
    trainer = Trainer(estimator=estimator)
    lone, whole = group([1.0, None, None, None]), group([0.0, 1.0, 1.0, 0.0])
    batch, metrics = trainer.sample(2)
    assert set(batch.keys) == keys(lone, 0) | keys(whole, 0, 1, 2, 3)
    assert metrics["training/lone_groups"] == 0


def test_one_rollout_a_prompt_is_not_a_lone_trajectory(queue):
    trainer = Trainer(actor_rollout_ref__rollout__n=1)
    first, second = group([1.0]), group([0.0])
    assert set(trainer.sample(2)[0].keys) == keys(first, 0) | keys(second, 0)


def test_a_trajectory_of_several_rows_is_still_a_lone_one(queue):
    trainer = Trainer()
    lone, whole = group([1.0, None, None, None]), group([0.0, 1.0, 1.0, 0.0])
    fields = list_of_dict_to_tensordict([row(lone, 0, 1.0)])
    tq.kv_batch_put(keys=[f"{lone}_0_1"], partition_id="train", fields=fields, tags=[{"seq_len": 2 * LENGTH}])
    assert set(trainer.sample(2)[0].keys) == keys(whole, 0, 1, 2, 3)


def test_up_to_the_limit_training_goes_on(queue):
    trainer = Trainer()
    group([1.0, 0.0, None, None])
    group([1.0, 0.0, None, None])
    batch, metrics = trainer.sample(2)
    assert len(batch.keys) == 4 and metrics["training/unscored_share"] == 0.5


def test_past_the_limit_training_stops_and_says_why(queue):
    trainer = Trainer()
    group([1.0, 0.0, None, None])
    group([1.0, None, None, None], reason="an older reason")
    group([None, None, None, None])
    with pytest.raises(JudgeOutage) as stopped:
        trainer.sample(3)
    text = str(stopped.value)
    assert text.startswith("judge http://judge:8000/v1 (model m): 9 of 12 trajectories of step 1 are unscored (75%")
    assert "rltr.judge.max_unscored_share" in text and "limit 50%" in text
    assert "Last reason (6 of 9 times): " + DOWN in text


@pytest.mark.parametrize("limit", [0.5, 1.0])
def test_with_nothing_left_it_stops_whatever_the_limit(queue, limit):
    trainer = Trainer(rltr__judge__max_unscored_share=limit)
    group([None] * 4)
    group([None] * 4)
    with pytest.raises(JudgeOutage, match="8 of 8 trajectories of step 1.*8 of 8 times.*HTTP 503"):
        trainer.sample(2)


def test_lone_groups_alone_are_nothing_to_train_on(queue):
    trainer = Trainer(rltr__judge__max_unscored_share=1.0)
    group([1.0, None, None, None])
    group([0.0, None, None, None])
    with pytest.raises(JudgeOutage, match="6 of 8.*nothing is left"):
        trainer.sample(2)


def test_what_fails_before_the_judge_is_not_the_judges_fault(queue):
    trainer = Trainer()
    group([1.0, 0.0, None, None], reason=None)
    group([1.0, 0.0, None, None], reason=None)
    group([1.0, 0.0, 0.0, None])
    batch, metrics = trainer.sample(3)
    assert len(batch.keys) == 7
    assert metrics["training/unscored"] == 1 and metrics["training/unscored_share"] == 1 / 8


def test_every_step_is_counted_by_itself(queue):
    trainer = Trainer()
    group([1.0, 0.0, 1.0, None])
    group([1.0, 0.0, 1.0, None])
    assert trainer.sample(2)[1]["training/unscored"] == 2
    group([1.0, 0.0, 1.0, 0.0])
    group([1.0, 0.0, 1.0, 0.0])
    assert trainer.sample(2)[1]["training/unscored"] == 0


def test_nothing_is_asked_about_a_step_that_is_scored(queue):
    trainer = Trainer()
    trainer.buffer._ledger = SimpleNamespace(take=lambda uids: pytest.fail("a call for nothing"))
    group([1.0, 0.0, 1.0, 0.0])
    group([1.0, 0.0, 1.0, 0.0])
    assert len(trainer.sample(2)[0].keys) == 8


def test_the_metrics_survive_verls_aggregation():
    aggregator = MetricsAggregator()
    metrics = Tally(scored=6, reasons=[DOWN] * 2, lone_groups=1).metrics()
    aggregator.add_step_metrics(metrics, sample_count=6)
    assert aggregator.get_aggregated_metrics() == metrics


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_asynchronous_trainers_replace_a_group_with_an_unscored_member(queue, mode):
    trainer = Trainer(mode)
    failed = group([1.0, 0.0, 1.0, None])
    first, second = group([1.0, 0.0, 1.0, 0.0]), group([1.0, 0.0, 1.0, 0.0])
    trainer.buffer.refill_fn = lambda number: setattr(trainer, "refilled", number)
    batch, metrics = trainer.sample(2)
    assert {key.split("_")[0] for key in batch.keys} == {first, second} and failed not in batch.keys
    assert trainer.refilled == 1
    assert metrics["training/unscored_share"] == 1 / 12


def test_asynchronous_trainers_replace_a_lone_trajectory_whose_peers_never_came(queue):
    """An agent loop may end without any output; verl then calls the prompt finished."""
    trainer = Trainer("separate_async")
    lone, whole = group([1.0]), group([1.0, 0.0, 1.0, 0.0])
    trainer.buffer.refill_fn = lambda number: setattr(trainer, "refilled", number)
    batch, metrics = trainer.sample(1)
    assert set(batch.keys) == keys(whole, 0, 1, 2, 3) and lone not in tq.kv_list("train")["train"]
    assert trainer.refilled == 1 and metrics["training/lone_groups"] == 1


@pytest.mark.parametrize(
    ("mode", "changes"),
    [("separate_async", {}), ("sync", {"trainer__v1__sampler__sync_refill_failed_groups": True})],
    ids=["async", "sync with refills"],
)
def test_an_outage_ends_the_replacing_of_groups(queue, mode, changes):
    trainer = Trainer(mode, **changes)
    group([None] * 4)
    with pytest.raises(JudgeOutage, match="8 of 8 trajectories of step 1"):
        trainer.sample(2)
    assert trainer.refilled <= 2


def test_groups_that_wait_their_turn_speak_for_the_judge(queue):
    """Asynchronous trainers throw failed groups away first; those alone would look like an outage."""
    trainer = Trainer("separate_async", actor_rollout_ref__rollout__n=2)
    for _ in range(4):
        group([1.0, 0.0])
    for _ in range(3):
        group([None, None])
    trainer.buffer.refill_fn = lambda number: setattr(trainer, "refilled", number)
    assert trainer.sample(2)[1]["training/unscored"] == 6


def test_validation_goes_on_past_the_limit_and_says_so(queue, caplog):
    trainer = Trainer()
    uid = group([1.0], "val")
    group([None], "val")
    group([None], "val")
    with caplog.at_level(logging.WARNING, logger="rltr_verl.rollout.sampler"):
        batch, _ = trainer.sample(3, "val")
    assert set(batch.keys) == keys(uid, 0)
    assert "2 of 3 trajectories of validation at step 1 are unscored" in caplog.text
    group([1.0, 0.0, 1.0, 0.0])
    assert trainer.sample(1)[1]["training/unscored"] == 0


def test_validation_without_any_score_stops(queue):
    trainer = Trainer(rltr__judge__max_unscored_share=1.0)
    group([None], "val")
    group([None], "val")
    with pytest.raises(JudgeOutage, match="2 of 2 trajectories of validation at step 1 are unscored.*HTTP 503"):
        trainer.sample(2, "val")


def test_what_the_recipe_leaves_out_says_nothing_about_the_judge(queue):
    """rltr.reward.truncated=unscored: half of the step was cut off, and the judge stands accused of nothing."""
    trainer = Trainer()
    group([1.0, None, None, 0.0], reason="truncated (length)", by_judge=False)
    group([None] * 4, reason="truncated (length)", by_judge=False)
    batch, metrics = trainer.sample(2)
    assert len(batch.keys) == 2
    assert metrics["training/left_out_truncated"] == 6
    assert metrics["training/unscored"] == metrics["training/unscored_share"] == 0


def test_the_share_is_of_what_the_judge_was_left(queue):
    trainer = Trainer()
    group([1.0, None, None, None], reason="truncated (length)", by_judge=False)
    group([None, None, 1.0, 1.0])
    assert trainer.sample(2)[1]["training/unscored_share"] == 2 / 5


@pytest.mark.parametrize("partition", ["train", "val"])
def test_where_all_was_cut_off_the_lengths_are_to_blame(queue, partition):
    trainer = Trainer()
    group([None] * 4, partition, reason="truncated (length)", by_judge=False)
    with pytest.raises(RolloutError, match="all 4 trajectories were cut off.*data.max_response_length"):
        trainer.sample(1, partition)


def test_reasons_come_from_other_processes(queue):
    trainer = Trainer()

    @ray.remote(num_cpus=0)
    def score(uid: str) -> None:
        asyncio.run(report(uid, 2, Missing("said elsewhere")))

    uid = group([1.0, 0.0, None, 1.0], reason=None)
    ray.get(score.remote(uid))
    assert trainer.buffer._ledger.take([uid, "another"]) == [Missing("said elsewhere")]
    assert trainer.buffer._ledger.take([uid]) == []


async def test_without_a_run_there_is_nobody_to_tell(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "get_actor", lambda *_: pytest.fail("Ray was asked"))
    await report("uid", 0, Missing(DOWN))


async def test_a_buffer_that_is_not_ours_is_no_error(queue, monkeypatch, caplog):
    def missing(name: str) -> None:
        raise ValueError(name)

    monkeypatch.setattr(ray, "get_actor", missing)
    with caplog.at_level(logging.WARNING, logger="rltr_verl.rollout.unscored"):
        await report("uid", 0, Missing(DOWN))
    assert "is not watched" in caplog.text


def test_reasons_are_kept_in_order_and_once_a_session():
    ledger = Ledger()
    for uid, session, reason in [("a", 0, "one"), ("b", 0, "two"), ("a", 1, "three"), ("a", 1, "four")]:
        ledger.add(uid, session, Missing(reason))
    assert ledger.take(["a"]) == [Missing("one"), Missing("four")]
    assert ledger.take(["a", "b"]) == [Missing("two")]
