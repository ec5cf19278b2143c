"""A small world and the shipped planner settings that play in it."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import pytest
from hydra import compose, initialize_config_module

import rltr_verl.world as world_package
from rltr_verl.config import RltrSettings, from_omegaconf
from rltr_verl.rollout.turns import Planner, Rollout, take_turns
from rltr_verl.world.policies import Policy

SMALL = world_package.WorldSizes(train=300, val=96, val_unseen=64, coldstart=240, siblings=4)


@pytest.fixture(scope="session")
def small_sizes():
    return SMALL


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    return world_package.build_world(tmp_path_factory.mktemp("world") / "seed1", seed=1, sizes=SMALL)


@pytest.fixture(scope="session")
def rows(world):
    """Rows of a split as verl hands them out."""

    def read(split: str) -> list[dict]:
        records = pd.read_parquet(world.split(split)).to_dict("records")
        return [{**record, "prompt": list(record["prompt"])} for record in records]

    return read


@pytest.fixture(scope="session")
def tokenizer(world):
    from verl.utils import hf_tokenizer

    return hf_tokenizer(str(world.model))


@pytest.fixture(scope="session")
def shipped(world):
    """``shipped(override, ...)``: the node ``rltr:`` of the planner recipe at cpu scale, on the small world."""
    import verl  # noqa: F401  (its plugin makes the recipes visible to Hydra)

    def settings(*overrides: str) -> RltrSettings:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("rltr_planner", overrides=["scale=cpu", f"rltr.world={world.folder}", *overrides])
        return from_omegaconf(config)

    return settings


@dataclass
class Typed:
    """What a scripted policy "samples": the interface of a rollout engine."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = "completed"


@pytest.fixture(scope="session")
def act_out(shipped, tokenizer):
    """``await act_out(policy, row)``: the policy in the real planner loop, with the real tools; returns its Rollout."""
    planner = Planner.build(shipped(), tokenizer)

    async def run(policy: Policy, row: dict) -> Rollout:
        rollout = Rollout(planner.template.prompt_ids(row["prompt"]), limit=400)

        async def generate(ids: list[int], room: int) -> Typed:
            seen = [item.text for turn in rollout.turns for item in turn.observations]
            text = policy.act(row, seen)
            return Typed(planner.template.encode(text if text.endswith("<answer>") else f"{text}<|im_end|>"))

        await take_turns(planner, rollout, generate, set(planner.schemas))
        return rollout

    return run
