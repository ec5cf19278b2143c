"""What verl's SFT trainer would round, or stumble over after the model is loaded, is named before."""

from __future__ import annotations

import pytest

from rltr_verl._compose import compose_recipe
from rltr_verl.errors import ConfigError, DataError
from rltr_verl.preflight_ranks import check_ranks
from tests.fakes.checkpoints import fsdp, track


def recipe(*overrides: str):
    return compose_recipe("rltr_coldstart_sft", list(overrides))


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("scale", ["cpu", "qwen3_1p7b_node", "qwen3_8b_node", "qwen3_1p7b_2nodes", "qwen3_8b_2nodes"])
def test_the_recipes_pass_with_one_batch_of_rows(scale, monkeypatch):
    config = recipe(f"sft_scale={scale}")
    check_ranks(config, config.data.train_batch_size)
    monkeypatch.setenv("WORLD_SIZE", str(config.trainer.nnodes * config.trainer.n_gpus_per_node))
    check_ranks(config, config.data.train_batch_size)


@pytest.mark.parametrize(
    ("overrides", "rows", "error", "named"),
    [
        (["sft_scale=cpu"], 23, DataError, "hold 23 rows, and a batch takes 24.*train_batch_size=23"),
        (["sft_scale=cpu", "data.train_max_samples=8"], 99, DataError, "hold 8 rows"),
        (["sft_scale=cpu", "trainer.n_gpus_per_node=5"], 99, ConfigError, "24 rows cannot be shared by 5 ranks"),
        (["sft_scale=qwen3_8b_node", "trainer.n_gpus_per_node=7"], 99, ConfigError, "by 7 ranks, 2 to a row"),
        (["sft_scale=qwen3_8b_node", "data.train_batch_size=6"], 99, ConfigError, "make it a multiple of 4"),
        (["sft_scale=qwen3_8b_node", "data.max_length=40000"], 99, ConfigError, "40000 tokens does not fit into 32768"),
    ],
)
def test_what_does_not_fit_is_named_with_its_fix(overrides, rows, error, named):
    with pytest.raises(error, match=named) as caught:
        check_ranks(recipe(*overrides), rows)
    assert caught.value.fix


def test_another_number_of_ranks_than_torchruns_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="torchrun starts 2 ranks, the recipe names 8"):
        check_ranks(recipe("sft_scale=qwen3_1p7b_node"), 999)
    check_ranks(recipe("sft_scale=cpu", "trainer.n_gpus_per_node=2"), 24)


def test_a_checkpoint_of_another_number_of_ranks_is_named(tmp_path):
    track(fsdp(tmp_path / "run" / "global_step_4", ranks=2).parent, 4)
    given = ("sft_scale=cpu", f"trainer.default_local_dir={tmp_path}/run")
    with pytest.raises(ConfigError, match=r"global_step_4 was written by 2 ranks.*this run has 1.*start 2 ranks"):
        check_ranks(recipe(*given), 24)
    check_ranks(recipe(*given, "trainer.n_gpus_per_node=2"), 24)
    check_ranks(recipe(*given, "trainer.resume_mode=disable"), 24)
