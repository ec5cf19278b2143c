"""The first training batch is checked through verl's real queue and our buffer; the trainer is reduced to what they
read of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rltr_verl.errors import MaskError
from rltr_verl.rollout.turns import Rollout
from rltr_verl.trajectory import TRAJECTORY_FIELD, Observation, Trajectory, Turn
from tests.fakes.families import FAMILIES, TOOLS, template_of, tokenizer_of

SAMPLER = {"path": "pkg://rltr_verl.rollout.sampler", "name": "build_sampler"}
UIDS = (f"prompt{number}" for number in count())
QUESTION = [{"role": "user", "content": "How warm is it in Arlen?"}]


class Trainer:
    """The parts of verl's trainer that build its buffer."""

    _build_replay_buffer = PPOTrainer._build_replay_buffer
    _resolve_filter_groups_metric = PPOTrainer._resolve_filter_groups_metric

    def __init__(self, family: str) -> None:
        self.trainer_mode = "sync"
        sampler = {
            "custom_sampler": SAMPLER,
            "max_off_policy_threshold": 8,
            "max_off_policy_strategy": "drop",
            "sampler_kwargs": {},
            "sync_refill_failed_groups": False,
        }
        self.config = OmegaConf.create(
            {
                "trainer": {"v1": {"sampler": sampler}},
                "data": {"train_batch_size": 2, "apply_chat_template_kwargs": FAMILIES[family].kwargs},
                "actor_rollout_ref": {"rollout": {"n": 1}},
                "algorithm": {"adv_estimator": "grpo"},
                "reward": {"reward_model": {"enable": False}},
                "rltr": {},
            }
        )
        self.buffer = self._build_replay_buffer()
        self.tokenizer = tokenizer_of(family)  # later than its buffer, as in verl

    def _add_prompts_to_generate(self, n: int) -> None:
        raise AssertionError("nothing to refill here")

    def sample(self, partition: str = "train") -> Any:
        return self.buffer.sample(global_steps=1, partition_id=partition, batch_size=2)[0]


def rolled_out(family: str, result: str) -> tuple[Rollout, Trajectory]:
    """A call, its observation, the stop marker."""
    template = template_of(family)
    rollout = Rollout(template.prompt_ids(QUESTION), 400)
    for text in ("call", "<answer>"):
        ids = template.encode(text) + ([template._end_id] if text == "call" else [])
        rollout.ids, rollout.mask = rollout.ids + ids, rollout.mask + [1] * len(ids)
        rollout.turns.append(Turn(template.decode(ids)))
        if text == "call":
            context, (seen,) = template.observe([result], turn_ended=True)
            rollout.add_context(context)
            rollout.turns[-1] = Turn(template.decode(ids), observations=(Observation(seen),))
    return rollout, rollout.trajectory("How warm is it in Arlen?", {"search": TOOLS[0]})


def put(family: str, flip: int | None = None, extra: bool = True, partition: str = "train") -> None:
    """One finished prompt of one session, as verl's agent loop worker puts it; ``flip`` breaks the mask there."""
    uid = next(UIDS)
    rollout, trajectory = rolled_out(family, "41 degrees" * (1 + len(uid) % 3))
    mask = list(rollout.mask)
    if flip is not None:
        mask[flip] = 1 - mask[flip]
    fields = {TRAJECTORY_FIELD: json.dumps(trajectory.to_dict())} if extra else {"turn_scores": []}
    row = {
        "prompts": torch.tensor(rollout.prompt_ids),
        "responses": torch.tensor(rollout.ids),
        "response_mask": torch.tensor(mask),
        "extra_fields": fields,
        "raw_prompt": QUESTION,
        "uid": uid,
    }
    tq.kv_put(key=uid, partition_id=partition, tag={"is_prompt": True, "status": "finished", "global_steps": 1})
    tags = [{"status": "success", "global_steps": 1, "seq_len": len(rollout.ids)}]
    tq.kv_batch_put(keys=[f"{uid}_0_0"], partition_id=partition, fields=list_of_dict_to_tensordict([row]), tags=tags)


@pytest.fixture(scope="module")
def ray_and_queue() -> Iterator[None]:
    ray.init("local", num_cpus=8, include_dashboard=False, logging_level="error", log_to_driver=False)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()
    ray.shutdown()


@pytest.fixture
def queue(ray_and_queue: None) -> Iterator[None]:
    yield
    for partition, items in (tq.kv_list() or {}).items():
        if items:
            tq.kv_clear(keys=list(items), partition_id=partition)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_batch_is_one_line_in_the_log(queue, caplog, family):
    put(family)
    put(family)
    trainer = Trainer(family)
    with caplog.at_level(logging.WARNING):
        trainer.sample()
    trained = sum(rolled_out(family, "41")[0].mask)
    (line,) = [record.getMessage() for record in caplog.records if "masks" in record.getMessage()]
    assert line.startswith(f"masks of the first batch: 2 trajectories, {2 * trained} trained tokens, ok")


@pytest.mark.parametrize("flip", [0, 3, -1])
def test_a_wrong_mask_stops_the_run(queue, flip):
    put("qwen3")
    put("qwen3", flip=flip)
    with pytest.raises(MaskError, match=r"masks of the first batch: trajectory prompt\d+_0_0: .*Fix: "):
        Trainer("qwen3").sample()


def test_a_chat_template_that_the_rollout_did_not_use_stops_the_run(queue):
    put("qwen2.5")
    put("qwen2.5")
    trainer = Trainer("qwen2.5")
    trainer.tokenizer = tokenizer_of("qwen3")
    with pytest.raises(MaskError):
        trainer.sample()


def test_rows_without_a_trajectory_stop_the_run(queue):
    put("qwen3", extra=False)
    put("qwen3", extra=False)
    with pytest.raises(MaskError, match="no trajectory came with the ids"):
        Trainer("qwen3").sample()


def test_only_the_first_training_batch_is_checked(queue, caplog):
    trainer = Trainer("qwen3")
    for partition, flip in (("val", 0), ("train", None), ("train", 0)):
        put("qwen3", flip=flip, partition=partition)
        put("qwen3", flip=flip, partition=partition)
        with caplog.at_level(logging.WARNING):
            trainer.sample(partition)
    assert sum("masks of the first batch" in record.getMessage() for record in caplog.records) == 1
