"""What every test starts from."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Undo an empty CUDA_VISIBLE_DEVICES that libraries leave behind in this process: Ray then refuses `num_gpus`."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]
