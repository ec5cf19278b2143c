"""verl's replay buffers without the fixed two-second poll.

Chosen by ``trainer.v1.sampler.custom_sampler.{path,name}``. verl's buffer looks for finished groups every two seconds,
on average one second too late, which is a large share of a short step. TransferQueue has nothing to wait on, so these
buffers still look, but after a time in proportion to how long the batch has been awaited: soon in a short step,
seldom in a long one. A batch is noticed at most 3 % later than it could be (10 ms at least, 2 s at most).

A look costs CPU time that the rollout may need, so where nothing but a whole batch is awaited the first one comes after
half of the time that the last batch took.
"""

from __future__ import annotations

import time
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

SHORTEST_WAIT = 0.01
LONGEST_WAIT = 2.0
SHARE_OF_ELAPSED = 0.03
SHARE_OF_LAST = 0.5


def next_wait(elapsed: float) -> float:
    """Seconds to the next look, having waited for ``elapsed`` seconds: 3 % of it, within the bounds above."""
    return min(max(SHARE_OF_ELAPSED * elapsed, SHORTEST_WAIT), LONGEST_WAIT)


class _Prompt:
    """Waits in proportion to the time waited so far, in place of ``poll_interval``."""

    _since: float | None = None
    _first_wait = 0.0

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        now = time.monotonic()
        first, self._since = self._since is None, now if self._since is None else self._since
        self.poll_interval = max(next_wait(now - self._since), self._first_wait if first else 0.0)
        return super()._wait_for_next_poll(partition_id, last_debug_time)  # type: ignore[misc]


def _filter_arguments(refill_fn: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    """What verl passes to its own buffers, but not to custom ones, about filtering and refilling groups.

    ``refill_fn`` is a method of the trainer, and that is the only way to the trainer's settings from here.
    """
    trainer = getattr(refill_fn, "__self__", None)
    if trainer is None:
        return {}
    config = trainer.config
    metric = trainer._resolve_filter_groups_metric()
    refill_failed = bool(config.trainer.v1.sampler.get("sync_refill_failed_groups", False))
    batch = config.data.train_batch_size
    exact = metric is not None or refill_failed
    arguments = {
        "filter_groups_metric": metric,
        "sync_refill_failed_groups": refill_failed,
        "train_batch_size": batch,
        "gen_batch_size": 1 if exact else (config.data.get("gen_batch_size", None) or batch),
        "max_inflight_gen_batches": 1
        if metric is None
        else config.algorithm.filter_groups.get("max_inflight_gen_batches", 1),
    }
    return {key: arguments[key] for key in keys}


class PromptReplayBuffer(_Prompt, ReplayBuffer):
    """The synchronous trainer's buffer; filters and refills groups as verl's own does."""

    def __init__(self, *, refill_fn: Any = None, **kwargs: Any) -> None:
        given = _filter_arguments(
            refill_fn,
            (
                "filter_groups_metric",
                "sync_refill_failed_groups",
                "train_batch_size",
                "gen_batch_size",
                "max_inflight_gen_batches",
            ),
        )
        super().__init__(refill_fn=refill_fn, **{**given, **kwargs})

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict]:
        """A batch of finished groups, as soon as there is one."""
        begin, self._since = time.monotonic(), None
        sampled = super().sample(global_steps, partition_id, batch_size)
        if not self._refills and partition_id == "train":
            self._first_wait = SHARE_OF_LAST * (time.monotonic() - begin)
        return sampled

    @property
    def _refills(self) -> bool:
        """Whether groups that finish early may call for new ones."""
        return self.filter_groups_metric is not None or self.sync_refill_failed_groups


class PromptReplayBufferAsync(_Prompt, ReplayBufferAsync):
    """The asynchronous trainers' buffer."""

    def __init__(self, *, refill_fn: Any = None, **kwargs: Any) -> None:
        given = _filter_arguments(refill_fn, ("filter_groups_metric", "sync_refill_failed_groups"))
        super().__init__(refill_fn=refill_fn, **{**given, **kwargs})

    def wait_for_sampleable(self, global_steps: int, partition_id: str, target_count: int) -> tuple[set[str], dict]:
        """The groups that may be sampled, as soon as there are enough."""
        self._since = None
        return super().wait_for_sampleable(global_steps, partition_id, target_count)


def build_sampler(*, trainer_mode: str, **kwargs: Any) -> ReplayBuffer:
    """The buffer that fits the trainer's mode; name this as ``custom_sampler.name``."""
    buffer = PromptReplayBuffer if trainer_mode == "sync" else PromptReplayBufferAsync
    return buffer(trainer_mode=trainer_mode, **kwargs)
