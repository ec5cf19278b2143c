"""Weights that change under vLLM's CPU build, in its worker process.

vLLM loads a model once; a trainer sends new weights every step.
"""

from __future__ import annotations

from typing import Any

import torch

from rltr_verl.errors import ModelError


def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
    """Let a linear layer multiply by the weight it has at the time; vLLM would pack a copy and drop the weight.

    Args:
        layer: any layer with a ``weight``; its ``cpu_linear(x, weight, bias)`` is set.
        remove_weight: ignored.

    Raises:
        ModelError: the weight is no matrix (a convolution). vLLM's kernels pack those in place, so that new weights
            could not follow.
    """
    dimensions = layer.weight.dim()
    if dimensions != 2:
        problem = f"a {type(layer).__name__} with weights of {dimensions} dimensions cannot be updated on the CPU"
        raise ModelError(problem, where="vLLM", fix="use rollout_engine=transformers for this model, or a GPU.")
    layer.cpu_linear = torch.nn.functional.linear
