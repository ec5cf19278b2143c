"""Registrations with verl, each waiting for the verl module it belongs to.

Standard library and wrapt only: this is imported in every process that imports verl.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import wrapt

from rltr_verl import cpu, replacements

AGENT_LOOPS = {"rltr_planner": "rltr_verl.rollout.planner_loop.PlannerLoop"}
"""Agent loops by the name that rows carry in ``agent_name``; verl imports the class when a loop is first built."""


def _agent_loops(module: Any) -> None:
    for name, path in AGENT_LOOPS.items():
        module._agent_loop_registry[name] = {"_target_": path}


def _call(path: str) -> Callable[[Any], None]:
    """A hook that imports ``module:function`` and calls it."""
    module, function = path.split(":")

    def hook(_: Any) -> None:
        getattr(importlib.import_module(module), function)()

    return hook


def _import(module: str) -> Callable[[Any], None]:
    """A hook that imports ``module``, which registers itself; harmless while that very module is being imported."""

    def hook(_: Any) -> None:
        importlib.import_module(module)

    return hook


HOOKS: dict[str, Callable[[Any], None]] = {
    "hydra._internal.config_loader_impl": _call("rltr_verl._hydra:register"),
    "verl.experimental.agent_loop.agent_loop": _agent_loops,
    "verl.experimental.reward_loop.reward_manager.registry": _import("rltr_verl.reward_manager"),
    "verl.workers.rollout.replica": _call("rltr_verl.rollout.registration:register_replica"),
    "verl.workers.rollout.base": _call("rltr_verl.rollout.registration:register_adapter"),
}
"""Module -> what is registered once it is imported; Hydra's is the one that every composition goes through."""


def register_all() -> None:
    """Install every hook and replacement; without an accelerator also the CPU backend. Idempotent per process."""
    for module, hook in HOOKS.items():
        wrapt.register_post_import_hook(hook, module)
    replacements.install("everywhere")
    if cpu.wanted():
        cpu.activate()
