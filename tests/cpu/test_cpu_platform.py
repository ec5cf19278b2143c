"""The CPU as a verl platform: what verl asks of a device, answered for the CPU."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

pytestmark = pytest.mark.usefixtures("cpu_backend")


def test_verl_sees_the_cpu():
    from verl.utils import device

    assert device.get_device_name() == "cpu"
    assert device.get_nccl_backend() == "gloo"
    assert device.get_resource_name() == "GPU"
    assert device.is_device_available()
    assert not device.is_support_ipc()
    assert torch.zeros(1).to(device.get_device_id()).device.type == "cpu"


def test_ray_options_ask_for_the_declared_resource():
    from verl.plugin.platform import get_platform

    assert get_platform().ray_resource_options(0.5) == {"num_gpus": 0.5}


def test_memory_is_that_of_the_process():
    from verl.utils.device import get_torch_device

    device = get_torch_device()
    resident = psutil.Process(os.getpid()).memory_info().rss
    assert device.memory_allocated() == pytest.approx(resident, rel=0.2)
    assert device.max_memory_allocated() >= 0.9 * resident
    available, total = device.mem_get_info()
    assert 0 < available <= total


def test_verls_helpers_on_top_of_the_device_run():
    from verl.utils.flops_counter import get_device_flops
    from verl.utils.memory_utils import aggressive_empty_cache
    from verl.utils.profiler.performance import log_gpu_memory_usage

    aggressive_empty_cache()
    log_gpu_memory_usage("here")
    assert 0 < get_device_flops() < float("inf")


def test_seeding_goes_to_torch():
    from verl.utils.device import manual_seed

    manual_seed(7)
    first = torch.rand(3)
    manual_seed(7)
    assert torch.equal(first, torch.rand(3))
