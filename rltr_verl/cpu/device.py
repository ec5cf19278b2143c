"""The CPU in the role of ``torch.cuda``: the module verl's ``get_torch_device()`` returns.

``torch.cpu`` lacks the memory functions that verl calls on the hot path. Here they report the process's resident
memory and the machine's free memory, in bytes.
"""

from __future__ import annotations

import resource
import sys

import psutil
import torch
from torch.cpu import Stream, current_stream, stream, synchronize

__all__ = [
    "Stream",
    "current_device",
    "current_stream",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_rng_state",
    "ipc_collect",
    "is_available",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "set_device",
    "set_rng_state",
    "stream",
    "synchronize",
]

get_rng_state = torch.get_rng_state
set_rng_state = torch.set_rng_state


def is_available() -> bool:
    """Return False: there is no device memory to manage, and verl skips its cache clearing where this is False."""
    return False


def device_count() -> int:
    """Return 1: the machine's memory is one device, however many ranks share it."""
    return 1


def current_device() -> str:
    """Return ``"cpu"``, which torch accepts wherever verl passes a device index on."""
    return "cpu"


def set_device(device: int | str | torch.device) -> None:
    """Do nothing: ranks share the one CPU."""


def get_device_name(device: int | str | torch.device | None = None) -> str:
    """Return the key under which verl's FLOPs counter knows the CPU."""
    return "CPU"


def manual_seed(seed: int) -> None:
    """Seed torch's CPU generator."""
    torch.manual_seed(seed)


manual_seed_all = manual_seed


def empty_cache() -> None:
    """Do nothing: the allocator keeps no cache."""


def ipc_collect() -> None:
    """Do nothing: no device memory is shared between processes."""


def memory_allocated(device: int | str | torch.device | None = None) -> int:
    """Return the resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


def max_memory_allocated(device: int | str | torch.device | None = None) -> int:
    """Return the peak resident memory of this process in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def mem_get_info(device: int | str | torch.device | None = None) -> tuple[int, int]:
    """Return the machine's available and total memory in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total
