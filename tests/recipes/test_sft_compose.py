"""Both recipes of supervised fine-tuning compose at every scale, and verl's own classes take what they set."""

from __future__ import annotations

from pathlib import Path

import pytest
import verl  # noqa: F401  (loads the plugin)
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorkerConfig

from rltr_verl._compose import compose_recipe
from rltr_verl.errors import ConfigError
from rltr_verl.preflight_sft import check_sft

RECIPES = ("rltr_coldstart_sft", "rltr_summarizer_sft")
SCALES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes" / "sft_scale").glob("*.yaml"))
REAL = [scale for scale in SCALES if scale != "cpu"]
HEADS = {"qwen3_1p7b": (16, 8), "qwen3_8b": (32, 8)}
"""Attention heads and key-value heads, from the models' config.json."""

every = pytest.mark.parametrize(("name", "scale"), [(name, scale) for name in RECIPES for scale in SCALES])


def recipe(name: str, scale: str, *overrides: str) -> DictConfig:
    return compose_recipe(name, [f"sft_scale={scale}", *overrides])


def keys(config: DictConfig) -> set[str]:
    """Dotted names of all leaves."""
    found: set[str] = set()
    for key, value in config.items():
        below = keys(value) if isinstance(value, DictConfig) and len(value) else {""}
        found |= {f"{key}.{name}".rstrip(".") for name in below}
    return found


def ranks(config: DictConfig) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


@every
def test_verl_knows_every_key_but_ours(name, scale):
    verls = keys(compose_recipe("sft_trainer_engine"))
    ours = {key for key in keys(recipe(name, scale)) - verls if not key.startswith("rltr.")}
    assert ours - {"model.override_config.attn_implementation"} == {"data.rltr_loss"}


@every
def test_verls_classes_take_the_recipe(name, scale, tiny_folder):
    """As ``SFTTrainer`` builds them; the model is the tiny one, since no hub is reachable."""
    config = recipe(name, scale, f"model.path={tiny_folder}")
    parts = {
        key: omega_conf_to_dataclass(config[key]) for key in ("model", "engine", "optim", "checkpoint", "profiler")
    }
    model, engine, optimizer = parts["model"], parts["engine"], parts["optim"]
    assert isinstance(model, HFModelConfig) and isinstance(engine, FSDPEngineConfig)
    assert isinstance(optimizer, FSDPOptimizerConfig) and optimizer.lr > 0
    assert engine.strategy == "fsdp2" and not engine.param_offload and not engine.optimizer_offload
    assert model.use_remove_padding == model.enable_gradient_checkpointing == (scale != "cpu")
    assert set(parts["checkpoint"].save_contents) == {"model", "optimizer", "extra", "hf_model"}
    TrainingWorkerConfig(
        model_type="language_model",
        model_config=model,
        engine_config=engine,
        optimizer_config=optimizer,
        checkpoint_config=parts["checkpoint"],
        profiler_config=parts["profiler"],
    )


@every
def test_sizes_fit_each_other(name, scale):
    config = recipe(name, scale)
    data, parallel = config.data, config.engine.ulysses_sequence_parallel_size
    assert ranks(config) % parallel == 0 and data.train_batch_size % (ranks(config) // parallel) == 0
    assert data.use_dynamic_bsz and data.max_token_len_per_gpu * parallel >= data.max_length
    shards = config.engine.fsdp_size
    assert shards == -1 or ranks(config) % shards == 0 and shards == config.trainer.n_gpus_per_node
    assert data.truncation == "error" and data.pad_mode == "no_padding"
    assert config.trainer.resume_mode == "auto"


@pytest.mark.parametrize("scale", REAL)
def test_sequence_parallelism_divides_the_models_heads(scale):
    config = recipe("rltr_coldstart_sft", scale)
    parallel = config.engine.ulysses_sequence_parallel_size
    assert all(heads % parallel == 0 for heads in HEADS[scale.rsplit("_", 1)[0]])
    assert parallel == 1 or config.model.use_remove_padding


@pytest.mark.parametrize("scale", REAL)
def test_rows_of_the_cold_start_are_as_long_as_a_rollouts_may_be(scale):
    rollouts = compose_recipe("rltr_planner", [f"scale={scale.replace('_2nodes', '_node')}"]).data
    longest = rollouts.max_prompt_length + rollouts.max_response_length
    assert recipe("rltr_coldstart_sft", scale).data.max_length >= longest


@pytest.mark.parametrize("size", sorted(HEADS))
def test_two_nodes_train_what_one_does(size):
    one, two = (keys_and_values(recipe("rltr_coldstart_sft", f"{size}_{nodes}")) for nodes in ("node", "2nodes"))
    changed = {key: (one[key], two[key]) for key in one if one[key] != two[key]}
    assert one.keys() == two.keys() and changed == {"trainer.nnodes": (1, 2), "engine.fsdp_size": (-1, 8)}


def keys_and_values(config: DictConfig) -> dict[str, object]:
    return {key: OmegaConf.select(config, key) for key in keys(config)}


@pytest.mark.parametrize(("name", "scale"), [(name, scale) for name in RECIPES for scale in REAL])
def test_a_scale_for_real_models_asks_for_the_users_data(name, scale):
    with pytest.raises(ConfigError, match=r"data\.train_files.*a value is missing"):
        check_sft(recipe(name, scale))


def test_the_summarizer_asks_for_its_data_on_the_cpu_too_and_compares_no_prompts():
    config = recipe("rltr_summarizer_sft", "cpu")
    with pytest.raises(ConfigError, match=r"data\.train_files.*a value is missing"):
        check_sft(config)
    assert config.rltr.tools == [] and recipe("rltr_coldstart_sft", "cpu").rltr.tools != []


def test_each_recipe_says_what_is_trained_and_keeps_its_checkpoints_apart():
    planner, summarizer = (recipe(name, "cpu") for name in RECIPES)
    assert (planner.data.rltr_loss, summarizer.data.rltr_loss) == (None, "all_assistant")
    assert planner.trainer.default_local_dir != summarizer.trainer.default_local_dir
