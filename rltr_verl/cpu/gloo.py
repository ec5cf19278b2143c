"""The process group of a CPU run.

verl names a backend for ``cpu`` and one for its device. Where the device is the CPU the name becomes
``cpu:gloo,cpu:gloo``, which torch refuses.
"""

from __future__ import annotations

import os
from datetime import timedelta

BACKEND = "cpu:gloo"


def initialize_global_process_group(timeout_second: int = 36000) -> tuple[int, int, int]:
    """Open the gloo group of a run under ``torchrun`` and return (local rank, rank, world size)."""
    import torch.distributed

    torch.distributed.init_process_group(
        backend=BACKEND,
        timeout=timedelta(seconds=timeout_second),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )
    return int(os.environ["LOCAL_RANK"]), torch.distributed.get_rank(), torch.distributed.get_world_size()


def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
    """Open the gloo group of a Ray worker, from the environment verl gave it, unless one is open."""
    import torch.distributed

    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group(
        backend=backend or BACKEND,
        rank=int(os.environ.get("RANK", 0)),
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        timeout=None if timeout_second is None else timedelta(seconds=timeout_second),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )
