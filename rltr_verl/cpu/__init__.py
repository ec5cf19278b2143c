"""Stock verl on a machine without an accelerator.

:func:`wanted` decides, :func:`activate` registers. Everything goes through verl's public registries where there is one:

====================  ==============================================================  ================================
what                  how verl is told                                                where
====================  ==============================================================  ================================
platform ``cpu``      ``PlatformRegistry.register`` and ``set_platform``              :mod:`rltr_verl.cpu.platform`
engines               ``EngineRegistry.register`` (language and value model)          :mod:`rltr_verl.cpu.engine`
symbols with no seam  replaced by name, each with its reason                          :mod:`rltr_verl.replacements`
====================  ==============================================================  ================================

Both functions run in every process that imports verl, so they must be cheap: registrations are post-import hooks that
load the module concerned only when verl itself does.
"""

from __future__ import annotations

import os
import socket

import wrapt

from rltr_verl.cpu import vllm_cpu
from rltr_verl.replacements import install

#: Remembers the answer of the accelerator check for child processes, as ``<host>=yes`` or ``<host>=no``: the check may
#: start a vendor's tool, and a process of another host must not believe it.
CACHE_VARIABLE = "RLTR_ACCELERATOR_FOUND"

_REGISTRATIONS = {
    "verl.plugin.platform.platform_manager": "rltr_verl.cpu.platform:install",
    "verl.workers.engine.fsdp.transformer_impl": "rltr_verl.cpu.engine:register",
}

_active = False


def wanted() -> bool:
    """Return whether verl should run on the CPU.

    True if ``VERL_PLATFORM=cpu``, or if that variable is unset and no accelerator is found on this host. A process that
    sees no device (a Ray actor without a GPU) on a host that has one gets False: the check is verl's own, by the
    vendors' tools, not by what this process may use. Call it from a process that has imported verl.
    """
    platform = os.environ.get("VERL_PLATFORM", "").strip().lower()
    if platform:
        return platform == "cpu"
    return not _accelerator_found()


def activate() -> None:
    """Register the CPU platform, the engines and the replacements; a second call does nothing.

    Each takes effect when verl imports the module concerned, at once if it already has.
    """
    global _active
    if _active:
        return
    _active = True
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]  # Ray refuses num_gpus with it, and here that only counts trainer ranks
    vllm_cpu.install()
    for module, hook in _REGISTRATIONS.items():
        wrapt.register_post_import_hook(hook, module)
    install("cpu")


def _accelerator_found() -> bool:
    """Return whether this host has an accelerator, from the remembered answer if it is about this host."""
    host, _, answer = os.environ.get(CACHE_VARIABLE, "").rpartition("=")
    if host != socket.gethostname() or answer not in ("yes", "no"):
        answer = "yes" if _any_platform_available() else "no"
        os.environ[CACHE_VARIABLE] = f"{socket.gethostname()}={answer}"
    return answer == "yes"


def _any_platform_available() -> bool:
    """Ask every platform registered with verl, other than ours, whether its hardware is on this host."""
    from verl.plugin.platform import PlatformRegistry

    platforms = (PlatformRegistry.get(name) for name in PlatformRegistry.registered_names() if name != "cpu")
    return any(platform().is_platform_available(use_smi_check=True) for platform in platforms if platform)
