"""verl's replay buffers, aware of unscored trajectories and without the fixed two-second poll.

Chosen by ``trainer.v1.sampler.custom_sampler.{path,name}``.

A session without a score leaves no row, so it enters neither its group's baseline nor the loss. What is left of its
group trains, as under verl's own buffers, with one exception: an estimator that compares a trajectory with its group
has nothing to compare a lone one with, and verl would take its raw reward for the advantage. Such a group is left out,
or replaced where verl replaces failed groups. Past ``rltr.judge.max_unscored_share`` the buffer stops training.

verl's buffer looks for finished groups every two seconds, on average one second too late, which is a large share of a
short step. TransferQueue has nothing to wait on, so these buffers still look, but after a time in proportion to how
long the batch has been awaited: soon in a short step, seldom in a long one. A batch is noticed at most 3 % later than
it could be (10 ms at least, 2 s at most).

A look costs CPU time that the rollout may need, so where nothing but a whole batch is awaited the first one comes after
half of the time that the last batch took.

The masks of the first training batch are checked before anything is updated (:mod:`rltr_verl.rollout.first_batch`).
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from rltr_verl.rollout.first_batch import FirstBatch
from rltr_verl.rollout.unscored import RemoteLedger, Tally, build_watch

_LOG = logging.getLogger(__name__)

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


def is_group_relative(estimator: str) -> bool:
    """Whether an advantage estimator of verl's registry compares the trajectories of a prompt.

    One that does is told which rows belong together (parameter ``index``): grpo, rloo, opo, gpg and their like. gae,
    reinforce_plus_plus and remax do not.
    """
    return "index" in inspect.signature(get_adv_estimator_fn(estimator)).parameters


def count_sessions(rows: Iterable[str]) -> Counter[str]:
    """Sessions per prompt that left a row; the key of a row is ``{uid}_{session}_{index}``."""
    return Counter(uid for uid, _ in {tuple(key.split("_")[:2]) for key in rows})


class _Scored:
    """Keeps lone trajectories from training, and watches the share of unscored ones."""

    _replaces_failed = True
    partitions: dict[str, dict[str, dict]]
    finished_keys: dict[str, set[str]]
    failure_keys: dict[str, set[str]]

    def __init__(self, *, refill_fn: Any = None, **kwargs: Any) -> None:
        super().__init__(refill_fn=refill_fn, **kwargs)  # type: ignore[call-arg]
        config = OmegaConf.create(getattr(getattr(refill_fn, "__self__", None), "config", {}))
        self._rollouts = OmegaConf.select(config, "actor_rollout_ref.rollout.n", default=1)
        self._estimator = OmegaConf.select(config, "algorithm.adv_estimator")
        self._step_size = self._rollouts * OmegaConf.select(config, "data.train_batch_size", default=0)
        self._watch = build_watch(config)
        self._ledger = RemoteLedger() if ray.is_initialized() else None
        self._tally, self._step = Tally(), 0
        self._first_batch = FirstBatch(getattr(refill_fn, "__self__", None))

    @cached_property
    def _compares(self) -> bool:
        """Whether a trajectory needs others of its group. Asked late, so that users' estimators are registered."""
        return self._rollouts > 1 and self._estimator is not None and is_group_relative(self._estimator)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict]:
        """A batch of finished groups; the metrics of a training step tell how many trajectories are unscored.

        Raises:
            JudgeOutage: over ``rltr.judge.max_unscored_share`` of a step is unscored, or nothing scored is left.
            RolloutError: nothing is left because all was cut off, and the recipe leaves that out.
            MaskError: other tokens than the sampled ones would be trained; looked at once, in the first batch.
        """
        self._step = global_steps
        batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        if partition_id == "val":
            return batch, metrics
        self._first_batch.check(batch.keys, partition_id)
        metrics, self._tally = {**metrics, **self._tally.metrics()}, Tally()
        return batch, metrics

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> tuple:
        """Where verl replaces failed groups, a lone trajectory's group is one of them."""
        reasons = super()._terminal_eviction_reasons(global_steps, partition_id)  # type: ignore[misc]
        stale, filtered, failed, counts = reasons
        if partition_id == "val" or not self._replaces_failed:
            return reasons
        ended = self.finished_keys[partition_id] | self.failure_keys[partition_id]
        lone = self._lone(ended, self.partitions[partition_id])
        return stale, filtered, failed | lone, counts

    def _evict_terminal_groups(self, global_steps: int, partition_id: str, eviction_reasons: tuple) -> tuple:
        """Groups that verl throws away count too, else it would replace them for as long as an outage lasts."""
        evicted = set().union(*eviction_reasons[:3])
        if evicted:
            self._count(self._tally, partition_id, evicted)
            self._stop_past_limit(partition_id, evicted, at_least=self._step_size)
        return super()._evict_terminal_groups(global_steps, partition_id, eviction_reasons)  # type: ignore[misc]

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: set[str], batch_size: int) -> tuple:
        """verl's choice of groups, without the rows of lone trajectories."""
        selected, rows, steps = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)  # type: ignore[misc]
        if partition_id == "val":
            self._look_at_validation(selected, rows)
            return selected, rows, steps
        self._count(self._tally, partition_id, selected)
        self._stop_past_limit(partition_id, set(selected))
        lone = self._lone(selected, rows)
        kept = {key: tag for key, tag in rows.items() if key.split("_")[0] not in lone}
        if (self._tally.reasons or self._tally.cut) and not _any_of(selected, kept):
            raise self._watch.nothing_left(self._tally, f"step {self._step}")
        if lone:
            tq.kv_clear(partition_id=partition_id, keys=list(rows.keys() - kept.keys()))
        return selected, kept, steps

    def _look_at_validation(self, selected: list[str], rows: dict[str, dict]) -> None:
        tally, what = Tally(), f"validation at step {self._step}"
        self._count(tally, "val", selected)
        if (tally.reasons or tally.cut) and not _any_of(selected, rows):
            raise self._watch.nothing_left(tally, what)
        if self._watch.over(tally):
            _LOG.warning("Validation goes on with what is scored. %s", self._watch.outage(tally, what))

    def _lone(self, uids: Collection[str], rows: Iterable[str]) -> set[str]:
        """The groups of which a single trajectory is left, if the estimator compares within groups."""
        if not self._compares:
            return set()
        sessions = count_sessions(rows)
        return {uid for uid in uids if sessions[uid] == 1}

    def _count(self, tally: Tally, partition_id: str, uids: Collection[str]) -> None:
        """Add what came of these groups to ``tally``; only failed ones can hold unscored trajectories."""
        rows = self.partitions[partition_id]
        failed = self.failure_keys[partition_id] & set(uids)
        sessions = count_sessions(rows)
        tally.scored += sum(sessions[uid] for uid in uids)
        tally.lone_groups += len(self._lone(uids, rows))
        if failed and self._ledger:
            tally.add(self._ledger.take(failed))

    def _stop_past_limit(self, partition_id: str, handled: set[str], at_least: int = 0) -> None:
        """Stop if the step is over the limit, once ``at_least`` trajectories of it are known.

        Groups that wait for their turn, all scored, count as well: those thrown away before them are the worst ones.
        """
        sessions = count_sessions(self.partitions[partition_id])
        waiting = self.finished_keys[partition_id] - handled
        tally = replace(self._tally, scored=self._tally.scored + sum(sessions[uid] for uid in waiting))
        if tally.ended >= at_least and self._watch.over(tally):
            raise self._watch.outage(tally, f"step {self._step}")


def _any_of(uids: Iterable[str], rows: Iterable[str]) -> bool:
    """Whether one of these prompts left a row."""
    return not set(uids).isdisjoint(count_sessions(rows))


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


class PromptReplayBuffer(_Prompt, _Scored, ReplayBuffer):
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
        if not self._replaces_failed and partition_id == "train":
            self._first_wait = SHARE_OF_LAST * (time.monotonic() - begin)
        return sampled

    @property
    def _replaces_failed(self) -> bool:  # type: ignore[override]
        """Whether groups that finish early may call for new ones."""
        return self.filter_groups_metric is not None or self.sync_refill_failed_groups


class PromptReplayBufferAsync(_Prompt, _Scored, ReplayBufferAsync):
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
