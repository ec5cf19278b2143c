"""Every shipped combination of recipe groups composes against verl's schema and passes verl's own validation."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path

import pytest
import verl  # noqa: F401  (loads the plugin, which makes the recipes visible to Hydra)
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.workers.config import RolloutConfig

from rltr_verl.config import from_omegaconf
from rltr_verl.preflight import check, check_engine
from rltr_verl.world import build_world

RECIPES = Path(__file__).parents[2] / "recipes"


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (RECIPES / group).glob("*.yaml"))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_world(tmp_path_factory.mktemp("world") / "w", seed=1)


def planner(*overrides: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("rltr_planner", overrides=list(overrides))


def given(world, scale: str, judge: str) -> list[str]:
    """What a user must give for a scale or judge; models are replaced by the tiny one, since no hub is reachable."""
    values = [f"actor_rollout_ref.model.path={world.model}", f"rltr.world={world.folder}"]
    if scale != "cpu":
        values += [f"data.train_files={world.folder}/train.parquet", f"data.val_files={world.folder}/val.parquet"]
        values += [f"+rltr.tool_settings.search.corpus={world.folder}/facts.jsonl"]
    if judge == "endpoint":
        values += ["rltr.judge.base_url=http://127.0.0.1:9/v1", "rltr.judge.model=judge"]
    return values


COMBINATIONS = list(itertools.product(options("algo"), options("kl"), options("judge"), options("scale")))


@pytest.mark.parametrize(("algo", "kl", "judge", "scale"), COMBINATIONS)
def test_combination_composes_and_validates(world, algo, kl, judge, scale):
    config = planner(f"algo={algo}", f"kl={kl}", f"judge={judge}", f"scale={scale}", *given(world, scale, judge))
    validate_config(config, need_reference_policy(config), need_critic(config))
    settings = from_omegaconf(config)
    assert settings.judge.backend == judge
    assert need_critic(config) == (algo == "ppo")
    assert need_reference_policy(config) == (kl != "off")
    rollout = config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert rollout.max_model_len is None or rollout.max_model_len >= longest
    OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize("engine", options("rollout_engine"))
@pytest.mark.parametrize("scale", options("scale"))
def test_every_scale_takes_every_engine(world, scale, engine):
    config = planner(f"rollout_engine={engine}", f"scale={scale}", *given(world, scale, "hosted"), "judge=hosted")
    validate_config(config, need_reference_policy(config), need_critic(config))
    rollout, judge = config.actor_rollout_ref.rollout, config.reward.reward_model.rollout
    assert rollout.name == judge.name == engine
    check_engine(config, from_omegaconf(config))
    assert engine != "transformers" or rollout.tensor_model_parallel_size == 1


@pytest.mark.parametrize(
    ("scale", "engine"), [("cpu", "transformers"), ("qwen3_1p7b_node", "vllm"), ("qwen3_8b_node", "vllm")]
)
def test_a_scale_names_its_engine(scale, engine):
    assert planner(f"scale={scale}").actor_rollout_ref.rollout.name == engine


def test_vllm_without_a_gpu_differs_in_values_only():
    here, there = (planner("rollout_engine=vllm", f"scale={scale}") for scale in ("cpu", "qwen3_1p7b_node"))
    added = set(here.actor_rollout_ref.rollout.engine_kwargs.vllm)
    assert set(here.actor_rollout_ref.rollout) == set(there.actor_rollout_ref.rollout)
    assert added <= {field.name for field in fields(RolloutConfig)}  # settings of vLLM that verl knows by these names


@pytest.mark.parametrize(
    ("estimator", "critic", "in_loss", "in_reward"),
    [("grpo", False, True, False), ("gae", True, False, True), ("reinforce_plus_plus", False, True, False)],
)
def test_the_estimator_alone_brings_what_it_needs(world, estimator, critic, in_loss, in_reward):
    config = planner("scale=cpu", f"algorithm.adv_estimator={estimator}")
    assert need_critic(config) is critic
    assert config.actor_rollout_ref.actor.use_kl_loss is in_loss
    assert config.algorithm.use_kl_in_reward is in_reward


def test_what_the_user_sets_wins_over_the_estimators_table(world):
    config = planner("scale=cpu", "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1", "critic.enable=false")
    assert config.actor_rollout_ref.rollout.n == 1
    assert need_critic(config) is False


def test_unknown_keys_are_refused_by_hydra_and_by_the_settings(world):
    with pytest.raises(ConfigCompositionException):
        planner("scale=cpu", "rltr.reward.flor=0")
    config = planner("scale=cpu", "+rltr.reward.flor=0")
    from rltr_verl.errors import ConfigError

    with pytest.raises(ConfigError, match=r"rltr\.reward\.flor: unknown key 'flor'. Fix: did you mean 'floor'"):
        from_omegaconf(config)


@pytest.mark.parametrize("scale", [scale for scale in options("scale") if scale != "cpu"])
def test_a_scale_for_real_models_asks_for_the_users_data(scale):
    config = planner(f"scale={scale}")
    assert config.data.train_files is None and config.data.val_files is None


def test_recipes_are_found_from_any_folder(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert planner("scale=cpu").reward.reward_manager.name == "rltr"


def test_the_cpu_recipe_passes_the_preflight(world):
    check(planner("scale=cpu", f"rltr.world={world.folder}"))
