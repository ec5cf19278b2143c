"""Registers the rollout engine ``transformers`` with verl. Nothing heavy is imported before verl asks for a class."""

from __future__ import annotations

from typing import Any

NAME = "transformers"
"""Value of ``actor_rollout_ref.rollout.name`` that selects the engine."""

ADAPTER = "rltr_verl.rollout.transformers_adapter.TransformersServerAdapter"


def load_replica() -> type[Any]:
    """The replica class; verl calls this when a recipe selects the engine."""
    from rltr_verl.rollout.transformers_server import TransformersReplica

    return TransformersReplica


def register_replica() -> None:
    """Add the replica to verl's registry; to be called once ``verl.workers.rollout.replica`` is imported."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(NAME, load_replica)


def register_adapter() -> None:
    """Add the trainer-side adapter to verl's table; to be called once ``verl.workers.rollout.base`` is imported.

    verl offers no function for this table, whose values are dotted class paths.
    """
    from verl.workers.rollout import base

    base._ROLLOUT_REGISTRY[(NAME, "async")] = ADAPTER
