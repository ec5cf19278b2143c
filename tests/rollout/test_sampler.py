from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rltr_verl._compose import compose_recipe
from rltr_verl.rollout import sampler
from rltr_verl.rollout.sampler import LONGEST_WAIT, SHORTEST_WAIT, next_wait

SCALES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes" / "scale").glob("*.yaml"))
SAMPLER = {"path": "pkg://rltr_verl.rollout.sampler", "name": "build_sampler"}


class _Trainer:
    """The parts of verl's trainer that build a replay buffer, and nothing else of it."""

    _build_replay_buffer = PPOTrainer._build_replay_buffer
    _resolve_filter_groups_metric = PPOTrainer._resolve_filter_groups_metric

    def __init__(self, mode: str, custom: bool, **changes: Any) -> None:
        self.trainer_mode = mode
        self.config = OmegaConf.create(
            {
                "trainer": {
                    "v1": {
                        "sync": {},
                        "sampler": {
                            "custom_sampler": SAMPLER if custom else None,
                            "max_off_policy_threshold": 2,
                            "max_off_policy_strategy": "drop",
                            "sampler_kwargs": {},
                            "sync_refill_failed_groups": False,
                        },
                    }
                },
                "data": {"train_batch_size": 8, "gen_batch_size": None},
                "algorithm": {
                    "filter_groups": {
                        "enable": False,
                        "metric": "acc",
                        "max_inflight_gen_batches": 3,
                        "max_num_gen_batches": 0,
                    }
                },
                "reward": {"reward_model": {"enable": False, "enable_resource_pool": False}},
            }
        )
        for key, value in changes.items():
            OmegaConf.update(self.config, key, value)

    def _add_prompts_to_generate(self, n: int) -> None:
        raise AssertionError("nothing to refill here")


def _settings(buffer: ReplayBuffer, known: ReplayBuffer) -> dict[str, Any]:
    """What of ``buffer`` verl's own one has too."""
    return {name: vars(buffer)[name] for name in vars(known) if name not in ("refill_fn", "poll_interval")}


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"algorithm.filter_groups.enable": True}, {"trainer.v1.sampler.sync_refill_failed_groups": True}],
    ids=["plain", "dapo", "refill"],
)
def test_built_by_verl_it_has_the_settings_of_verls_own(mode: str, changes: dict[str, Any]) -> None:
    own = _Trainer(mode, custom=False, **changes)._build_replay_buffer()
    ours = _Trainer(mode, custom=True, **changes)._build_replay_buffer()
    assert isinstance(ours, ReplayBuffer if mode == "sync" else ReplayBufferAsync)
    assert type(ours) is not type(own)
    assert _settings(ours, own) == _settings(own, own)


@pytest.mark.parametrize("scale", SCALES)
def test_every_recipe_uses_it(scale: str) -> None:
    node = compose_recipe("rltr_planner", [f"scale={scale}"]).trainer.v1.sampler
    assert dict(node.custom_sampler) == SAMPLER


def test_waits_grow_with_the_time_waited_and_are_bounded() -> None:
    assert next_wait(0.0) == SHORTEST_WAIT
    assert next_wait(10.0) == pytest.approx(0.3)
    assert next_wait(1e6) == LONGEST_WAIT


class _Clock:
    """Time that passes only where the buffer sleeps."""

    now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    """The clock of verl's buffers and of ours; TransferQueue has nothing to clear."""
    import transfer_queue
    from verl.trainer.ppo.v1 import replay_buffer

    found = _Clock()
    monkeypatch.setattr(transfer_queue, "kv_clear", lambda **_: None)
    monkeypatch.setattr(replay_buffer, "time", found)
    monkeypatch.setattr(sampler, "time", found)
    return found


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
@pytest.mark.parametrize("seconds", [0.3, 20.0, 200.0])
def test_a_batch_is_noticed_soon_after_it_is_ready(
    mode: str, seconds: float, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metadata are stood in for; waiting, selection and the hand-over are verl's and ours."""
    buffer = _Trainer(mode, custom=True)._build_replay_buffer()
    begin, looks = clock.now, SimpleNamespace(n=0)

    def look() -> None:
        looks.n += 1
        state = buffer.finished_keys if clock.now >= begin + seconds else buffer.running_keys
        buffer.running_keys.clear()
        state["train"] = {"uid"}
        buffer.prompt_global_steps["train"] = {"uid": 1}
        buffer.partitions["train"] = {"uid_0_0": {}}

    monkeypatch.setattr(buffer, "_sync_metadata_from_transfer_queue", look)
    batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    assert batch.keys == ["uid_0_0"]
    assert 0 <= clock.now - begin - seconds <= next_wait(seconds)
    assert looks.n < 300  # every 10 ms it would be 20,000 of 200 s


@pytest.mark.parametrize("refills", [False, True])
def test_the_first_look_waits_for_half_of_the_last_batch_unless_groups_may_be_refilled(
    refills: bool, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"trainer.v1.sampler.sync_refill_failed_groups": refills}
    buffer = _Trainer("sync", custom=True, **changes)._build_replay_buffer()
    state = SimpleNamespace(ready=0.0, waits=[])

    def look() -> None:
        state.waits.append(buffer.poll_interval)
        keys = buffer.finished_keys if clock.now >= state.ready else buffer.running_keys
        buffer.running_keys.clear()
        keys["train"] = {"uid"}
        buffer.prompt_global_steps["train"] = {"uid": 1}
        buffer.partitions["train"] = {"uid_0_0": {}}

    monkeypatch.setattr(buffer, "_sync_metadata_from_transfer_queue", look)
    for _ in range(2):
        state.ready, state.waits = clock.now + 0.2, []
        buffer.finished_keys.clear()
        buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    first = state.waits[1]  # what was waited before the second look
    assert first == SHORTEST_WAIT if refills else first >= 0.1
