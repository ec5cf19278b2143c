"""Every verl symbol the CPU backend replaces, with the reason: the places where verl leaves no seam.

:func:`apply` puts one in when verl has imported its module. It refuses a symbol that verl has moved or whose parameters
changed, so that a new verl fails with the symbol's name and not somewhere behind it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from rltr_verl.cpu import gloo, logprobs, value_head
from rltr_verl.errors import PluginError


@dataclass(frozen=True)
class Replacement:
    """One function of verl's that ours stands in for.

    Attributes:
        module: dotted name of the module that holds it.
        attribute: its name there.
        function: ours; takes the same parameters.
        reason: why no registry or setting does.
    """

    module: str
    attribute: str
    function: Callable
    reason: str


REPLACEMENTS = (
    Replacement(
        module="verl.utils.distributed",
        attribute="initialize_global_process_group",
        function=gloo.initialize_global_process_group,
        reason="Builds the backend 'cpu:gloo,<device>:<backend>' itself; torch refuses a second entry for cpu. (SFT)",
    ),
    Replacement(
        module="verl.utils.distributed",
        attribute="initialize_global_process_group_ray",
        function=gloo.initialize_global_process_group_ray,
        reason="The same in the workers of main_ppo, whose caller passes no backend.",
    ),
    Replacement(
        module="verl.utils.model",
        attribute="load_valuehead_model",
        function=value_head.load_valuehead_model,
        reason="Asks for flash_attention_2 whatever the model's configuration says; flash-attention needs a GPU.",
    ),
    Replacement(
        module="verl.utils.torch_functional",
        attribute="logprobs_from_logits_v2",
        function=logprobs.logprobs_from_logits,
        reason="Loops over rows in Python; the engine hands it one row a token, thousands of tiny operations a step.",
    ),
)


def apply(replacement: Replacement, module: ModuleType) -> None:
    """Replace the symbol in ``module``.

    Raises:
        PluginError: the symbol is gone or takes other parameters than ours; names it.
    """
    original = getattr(module, replacement.attribute, None)
    name = f"{replacement.module}.{replacement.attribute}"
    if original is None:
        raise PluginError("verl no longer has this function", where=name, fix=_FIX)
    theirs, ours = (list(inspect.signature(function).parameters) for function in (original, replacement.function))
    if theirs != ours:
        raise PluginError(f"verl changed its parameters to {theirs}, ours takes {ours}", where=name, fix=_FIX)
    setattr(module, replacement.attribute, replacement.function)


_FIX = "install verl>=0.9.1,<0.10, or bring rltr_verl/cpu/replacements.py up to this verl."
