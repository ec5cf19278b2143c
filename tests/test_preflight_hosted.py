"""Bad input about a judge that verl serves: one clear error before Ray starts."""

from __future__ import annotations

import json
import shutil

import pytest

from rltr_verl._compose import compose_recipe
from rltr_verl.errors import ConfigError, ModelError
from rltr_verl.preflight import check
from rltr_verl.world import WorldSizes, build_world

SMALL = WorldSizes(train=100, val=16, val_unseen=16, coldstart=100, siblings=4)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_world(tmp_path_factory.mktemp("world") / "w", seed=1, sizes=SMALL)


def checked(world, *overrides: str) -> None:
    judge = ("judge=hosted", f"reward.reward_model.model_path={world.model}", "ray_kwargs.ray_init.num_gpus=2")
    length = "reward.reward_model.rollout.max_model_len=1024"
    check(compose_recipe("rltr_planner", ["scale=cpu", f"rltr.world={world.folder}", *judge, length, *overrides]))


def test_a_good_recipe_passes_although_no_judge_is_served_yet(world):
    checked(world)


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        (
            "reward.reward_model.model_path=null",
            ConfigError,
            "reward.reward_model.model_path: a value is missing. Fix: add reward.reward_model.model_path=",
        ),
        ("reward.reward_model.model_path=/no/such", ModelError, "reward.reward_model.model_path: no model folder"),
        ("reward.reward_model.enable=false", ConfigError, "Fix: leave it as judge=hosted sets it: .*enable=true"),
        ("reward.reward_model.enable_resource_pool=false", ConfigError, "enable_resource_pool=true"),
        ("reward.reward_model.rollout.free_cache_engine=true", ConfigError, "free_cache_engine=false"),
        ("reward.custom_reward_function.path=null", ConfigError, "path=pkg://rltr_verl.reward_manager"),
        (
            "reward.reward_model.n_gpus_per_node=2",
            ConfigError,
            "ray_kwargs.ray_init.num_gpus: 2 is less than the 3 .*Fix: set ray_kwargs.ray_init.num_gpus=3",
        ),
        (
            "reward.reward_model.rollout.max_model_len=16384",
            ConfigError,
            "max_model_len: the judge has positions for 1024 tokens, not 16384. Fix: set .*max_model_len=1024",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_fix(world, override, error, message):
    with pytest.raises(error, match=message):
        checked(world, override)


def test_a_model_that_cannot_chat_is_refused(world, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(world.model, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(ModelError, match="reward.reward_model.model_path: .* has no chat template"):
        checked(world, f"reward.reward_model.model_path={folder}")


def test_other_judges_need_none_of_it(world):
    check(compose_recipe("rltr_planner", ["scale=cpu", f"rltr.world={world.folder}"]))
