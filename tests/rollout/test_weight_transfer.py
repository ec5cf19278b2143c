from __future__ import annotations

import pytest
import torch

from rltr_verl.rollout.weight_transfer import pack, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 5)])
def test_tensors_survive_exactly(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    packed = pack("layer.weight", tensor)
    packed.data.setflags(write=False)  # as it comes out of Ray's shared memory
    name, received = unpack(packed)
    assert name == "layer.weight"
    assert received.dtype == dtype
    assert torch.equal(received, tensor)
    received.fill_(1)  # owns its memory


def test_strided_tensors_too() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T
    assert torch.equal(unpack(pack("w", tensor))[1], tensor)
