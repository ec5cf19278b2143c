"""A deterministic, seeded, offline world: facts, queries with needs, scripted policies and a tiny planner."""

from rltr_verl.world.build import World, WorldSizes, build_world, load_world

__all__ = ["World", "WorldSizes", "build_world", "load_world"]
