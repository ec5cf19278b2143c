"""The trainer's side of the rollout engine ``transformers``: pushes weights to the server of its replica."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from torch.distributed.device_mesh import DeviceMesh
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from rltr_verl.errors import ConfigError
from rltr_verl.rollout.registration import NAME
from rltr_verl.rollout.weight_transfer import PackedTensor, pack


def server_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """Name of the Ray actor that serves a replica; ``kind`` is empty for a policy, else ``reward`` or ``teacher``."""
    middle = f"server_{kind}_" if kind else "server_"
    return f"{NAME}_{middle}{replica_rank}{suffix}"


class TransformersServerAdapter(BaseRollout):
    """One lives in every trainer rank. A replica is one process, so each rank leads the replica of the same number.

    Args:
        config, model_config, device_mesh: as verl passes them to every adapter.
        replica_rank: given where the worker belongs to a replica outside the trainer; else the rank decides.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: DeviceMesh | None,
        replica_rank: int = -1,
    ) -> None:
        super().__init__(config, model_config, device_mesh)  # type: ignore[arg-type]
        size = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        rank = int(os.environ["RANK"])
        self.replica_rank = rank // size if replica_rank < 0 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._server: Any = None

    @property
    def server(self) -> Any:
        """Handle of the replica's server, looked up late because servers start after the trainer."""
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Bring ``weights`` or ``kv_cache`` back to the device."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Take weights and keys and values off the device."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self.server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        """Push every weight once to the server, in buckets of ``checkpoint_engine.update_weights_bucket_megabytes``.

        All ranks exhaust ``weights``, since gathering a sharded tensor is a collective; only the leader sends.
        The next bucket is gathered while the last one is on its way.
        Raises ConfigError for deltas and for adapter-only updates.
        """
        _refuse_partial(wire_format, peft_config)
        limit = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        bucket: list[PackedTensor] = []
        on_its_way: Any = None
        async for name, tensor in ensure_async_iterator(weights):
            if not self.is_leader_rank:
                continue
            bucket.append(pack(name, tensor))
            if sum(packed.data.nbytes for packed in bucket) >= limit:
                if on_its_way is not None:
                    await on_its_way
                on_its_way, bucket = self.server.update_weights_bucket.remote(bucket), []
        if self.is_leader_rank:
            if on_its_way is not None:
                await on_its_way
            await self.server.update_weights_bucket.remote(bucket, last=True, global_steps=global_steps)


def _refuse_partial(wire_format: str, peft_config: Any) -> None:
    if wire_format != "named_tensors":
        raise ConfigError(
            f"the transformers rollout takes whole tensors, not {wire_format!r}",
            where="rollout.checkpoint_engine.backend",
            fix="use a backend that sends named tensors",
        )
    if peft_config is not None:
        raise ConfigError(
            "the transformers rollout cannot load a LoRA adapter beside the base weights",
            where="actor_rollout_ref.model.lora",
            fix="set actor_rollout_ref.model.lora.merge=True",
        )
