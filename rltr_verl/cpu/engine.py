"""verl's FSDP2 engines on the CPU, in true fp32.

Subclasses of verl's own engines that change what cannot work or is wrong without an accelerator, so that a recipe need
not: the precision (verl computes in bf16 unless ``mixed_precision`` is set, whatever ``dtype`` says), FSDP1, memory
pinning and offloading, flash-attention (packed batches go without it, see ``packed_attention``), ``torch.compile``,
and the type that a saved model is said to have.

A rank computes on as many threads as ``OMP_NUM_THREADS`` says, which Ray sets to one for its workers. For a model large
enough to gain from more, ``RLTR_CPU_THREADS`` sets the number for training alone; the recipe for the CPU sets two.
Threads that spin while they wait lose several times what they gain where another process holds a core, so more than
one thread wants ``OMP_WAIT_POLICY=passive``, which the recipe sets too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from transformers import PretrainedConfig
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead

from rltr_verl.cpu import packed_attention
from rltr_verl.cpu.value_head import without_flash_attention
from rltr_verl.errors import ConfigError

Weights = Generator[tuple[str, torch.Tensor], None, None]
_FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


class _CPUEngine(FSDPEngine):
    """What the language model's and the value model's engine share."""

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig,
        checkpoint_config: CheckpointConfig,
    ) -> None:
        """Take verl's configuration as it is and run it on the CPU.

        Raises:
            ConfigError: a setting asks for what needs an accelerator: sequence parallelism or fused kernels.
        """
        _refuse_accelerator_features(model_config, engine_config)
        torch.set_num_threads(threads_per_rank())
        self._packed = pack_where_possible(without_flash_attention(model_config.hf_config))
        super().__init__(model_config, for_cpu(engine_config), optimizer_config, checkpoint_config)
        self.use_remove_padding = False  # what it does to a model is for flash-attention

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Shard the model as a trainable one: for a reference model verl would offload to pinned memory."""
        forward_only, self.engine_config.forward_only = self.engine_config.forward_only, False
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config.forward_only = forward_only

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> list[TensorDict]:
        """Run a batch without the columns that no model reads: verl copies them by row, for every micro-batch.

        The threads are set again because TransferQueue, on every fetch, sets them to what they were at its import.
        """
        torch.set_num_threads(threads_per_rank())
        run: Callable[..., list[TensorDict]] = super().forward_backward_batch  # verl forgets the None in its hint
        return run(without_objects(data), loss_function, forward_only)

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Run one micro-batch packed if the model's attention keeps sequences apart, else padded."""
        tensordict_utils.assign_non_tensor(micro_batch, use_remove_padding=self._packed)
        return super().forward_step(micro_batch, loss_function, forward_only)

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Weights, dict | None]:
        """Gather the full weights one by one, as copies: on one rank a gathered weight can be the one being trained."""
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)
        return ((name, weight.clone()) for name, weight in weights), peft_config

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Save, and let the Hugging Face folder name the type its weights have.

        verl writes the weights as they are but ``bfloat16`` into ``config.json``, so that loading them would round.
        """
        super().save_checkpoint(local_path, *args, **kwargs)
        if self.rank == 0 and self.checkpoint_manager.should_save_hf_model:
            name_type(Path(local_path) / "huggingface", next(self.module.parameters()).dtype)


class CPUEngineWithLMHead(_CPUEngine, FSDPEngineWithLMHead):
    """Actor, reference and SFT model."""


class CPUEngineWithValueHead(_CPUEngine, FSDPEngineWithValueHead):
    """Critic."""


def for_cpu(config: FSDPEngineConfig) -> FSDPEngineConfig:
    """Return ``config`` with what the CPU needs: FSDP2, fp32 unless ``mixed_precision`` is given, nothing offloaded."""
    return replace(
        config,
        strategy="fsdp2",
        mixed_precision=config.mixed_precision or _FP32,
        model_dtype=config.model_dtype or "fp32",
        param_offload=False,
        optimizer_offload=False,
        offload_policy=False,
        use_torch_compile=False,
    )


def pack_where_possible(config: PretrainedConfig) -> bool:
    """Choose packed attention in place of sdpa, in place, where it gives the same; return whether it did."""
    packs = config._attn_implementation == "sdpa" and packed_attention.fits(config)
    if packs:
        config._attn_implementation = packed_attention.NAME
    return packs


def without_objects(data: TensorDict) -> TensorDict:
    """Return ``data`` without its columns of Python objects, one a row (texts, tool schemas, the trajectory).

    Tensors and values of the whole batch stay, and so do ``multi_modal_inputs``.
    """
    dropped = {key for key, value in data.items() if isinstance(value, NonTensorStack)} - {"multi_modal_inputs"}
    return data.exclude(*dropped)


def name_type(model_folder: Path, dtype: torch.dtype) -> None:
    """Write ``dtype`` into the configuration of the model in ``model_folder``."""
    path = model_folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "dtype" if "dtype" in config else "torch_dtype"  # the name before transformers 5
    config[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def threads_per_rank() -> int:
    """Return the threads a rank computes on: ``RLTR_CPU_THREADS``, else what torch has now.

    Raises:
        ConfigError: the variable holds no positive whole number.
    """
    given = os.environ.get("RLTR_CPU_THREADS")
    if given is None:
        return torch.get_num_threads()
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"{given!r} is not a number of threads", where="RLTR_CPU_THREADS", fix="set 1 or more.")
    return int(given)


def _refuse_accelerator_features(model_config: HFModelConfig, engine_config: FSDPEngineConfig) -> None:
    if engine_config.ulysses_sequence_parallel_size > 1:
        raise ConfigError(
            "sequence parallelism needs packed batches and with them flash-attention, which has no CPU version",
            where="ulysses_sequence_parallel_size",
            fix="set it to 1 and use more ranks (trainer.n_gpus_per_node) instead.",
        )
    if model_config.use_fused_kernels:
        raise ConfigError(
            "fused kernels are Triton code for an accelerator", where="model.use_fused_kernels", fix="set it to false."
        )


def register(_: ModuleType) -> None:
    """Register both engines for device ``cpu`` under the backends ``fsdp`` and ``fsdp2``; both run FSDP2."""
    for model_type, engine in (("language_model", CPUEngineWithLMHead), ("value_model", CPUEngineWithValueHead)):
        EngineRegistry.register(model_type=model_type, backend=["fsdp", "fsdp2"], device="cpu")(engine)
