"""The CPU as a verl platform."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from verl.plugin.platform.platform_base import PlatformBase

from rltr_verl.cpu import device


class PlatformCPU(PlatformBase):
    """Device ``cpu``, collectives by gloo, and Ray's resource ``GPU`` as the count of ranks.

    Ray schedules verl's workers by one unit of an accelerator each. Declared as
    ``ray_kwargs.ray_init.num_gpus=<ranks>``, the resource ``GPU`` serves for that without any hardware behind it.
    """

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return device

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:  # type: ignore[override]  # torch would read the index 0 as the first accelerator
        return device.current_device()

    def device_count(self) -> int:
        return device.device_count()

    def set_device(self, device_index: int) -> None:
        device.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        device.synchronize()

    def manual_seed(self, seed: int) -> None:
        device.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        device.manual_seed_all(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the settings are about device memory."""

    def empty_cache(self) -> None:
        device.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # the variable Ray sets for its resource GPU

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Do nothing: there is no device profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: there is no device profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False  # weights travel through shared memory instead

    def cudart(self) -> Any:
        return None


def install(platform_manager: ModuleType) -> None:
    """Register :class:`PlatformCPU` as ``cpu`` and make it the current platform.

    Args:
        platform_manager: verl's module ``verl.plugin.platform.platform_manager``.
    """
    platform_manager.PlatformRegistry.register(platform="cpu")(PlatformCPU)
    with _quiet(platform_manager.logger):
        platform_manager.set_platform(PlatformCPU())


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Keep ``logger`` silent: where verl has looked for a platform before, it warns that its choice is replaced."""
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
