"""Weights on their way from a trainer process to a rollout server, as Ray arguments.

Ray writes an argument's arrays once into shared memory and the receiver reads them there, so a bucket is copied once
on each side. Tensors travel as raw bytes: numpy has no bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class PackedTensor(NamedTuple):
    """A named tensor as bytes, with what is needed to read them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def pack(name: str, tensor: torch.Tensor) -> PackedTensor:
    """Bytes of a tensor on any device. A contiguous CPU tensor is not copied: send it before it changes."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return PackedTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _bytes(flat))


def _bytes(flat: torch.Tensor) -> np.ndarray:
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def unpack(packed: PackedTensor) -> tuple[str, torch.Tensor]:
    """The name and a tensor that owns its memory (Ray's copy is read-only)."""
    dtype = getattr(torch, packed.dtype)
    tensor = torch.empty(packed.shape, dtype=dtype)
    if tensor.numel():
        _bytes(tensor.reshape(-1))[:] = packed.data
    return packed.name, tensor
