"""The tiny model and the CPU backend for the tests of ``rltr_verl.cpu``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("VERL_PLATFORM", "cpu")  # the tests are about the CPU on a machine with a GPU as well


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> str:
    """Folder of a random Qwen3 of two layers with its tokenizer, as verl's configuration holds it."""
    return str(tiny_folder)


@pytest.fixture(scope="session")
def cpu_backend() -> None:
    """verl in this process, with the CPU backend active."""
    import verl  # noqa: F401

    from rltr_verl import cpu

    cpu.activate()


@pytest.fixture(scope="module")
def one_rank(cpu_backend: None):
    """A gloo group of this process alone, opened as verl opens it in a worker."""
    import torch.distributed
    from verl.utils import distributed

    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        distributed.initialize_global_process_group_ray()
        yield
        torch.distributed.destroy_process_group()
