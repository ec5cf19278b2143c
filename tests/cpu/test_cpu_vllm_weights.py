"""What lets vLLM's CPU build take new weights; with vLLM itself it is tested in ``tests/vllm``."""

from __future__ import annotations

import pytest
import torch

from rltr_verl.cpu.vllm_weights import dispatch_cpu_unquantized_gemm
from rltr_verl.errors import ModelError


@pytest.mark.parametrize("remove_weight", [True, False])
def test_a_layer_multiplies_by_the_weight_of_now(remove_weight):
    layer = torch.nn.Linear(3, 2)
    dispatch_cpu_unquantized_gemm(layer, remove_weight)
    x = torch.randn(5, 3)
    with torch.no_grad():
        layer.weight += 1
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, layer.bias), layer(x))


def test_a_layer_that_vllm_packs_in_place_is_named():
    with pytest.raises(ModelError, match="Conv1d with weights of 3 dimensions"):
        dispatch_cpu_unquantized_gemm(torch.nn.Conv1d(2, 2, 3), remove_weight=True)
