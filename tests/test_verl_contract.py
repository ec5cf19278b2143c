"""Every verl symbol and config key this package leans on. A new verl that moves one fails here, with its name."""

from __future__ import annotations

import importlib
import inspect
import json
import sys

import pytest
import verl
from omegaconf import OmegaConf

from rltr_verl._compose import compose_recipe
from rltr_verl.checkpoints import TRACKER, Shards
from rltr_verl.merge import merger_command

SYMBOLS = [
    "transfer_queue:kv_clear",
    "verl:DataProto",
    "verl.checkpoint_engine.base:CheckpointEngineManager",
    "verl.experimental.agent_loop.agent_loop:AgentLoopBase",
    "verl.experimental.agent_loop.agent_loop:AgentLoopMetrics",
    "verl.experimental.agent_loop.agent_loop:AgentLoopOutput",
    "verl.experimental.agent_loop.agent_loop:_agent_loop_registry",
    "verl.experimental.reward_loop.reward_manager.base:RewardManagerBase",
    "verl.experimental.reward_loop.reward_manager.registry:register",
    "verl.experimental.reward_loop.router.naive_router:run_router",
    "verl.plugin.platform:PlatformRegistry",
    "verl.plugin.platform:set_platform",
    "verl.plugin.platform.platform_base:PlatformBase",
    "verl.trainer.main_ppo:main",
    "verl.trainer.ppo.core_algos:get_adv_estimator_fn",
    "verl.trainer.ppo.metric_utils:process_validation_metrics",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync",
    "verl.trainer.ppo.v1.trainer_base:process_validation_metrics",
    "verl.trainer.sft_trainer:main",
    "verl.utils.config:validate_config",
    "verl.utils.dataset.multiturn_sft_dataset:MultiTurnSFTDataset",
    "verl.utils.dataset.rl_dataset:RLHFDataset",
    "verl.utils.distributed:initialize_global_process_group",
    "verl.utils.distributed:initialize_global_process_group_ray",
    "verl.utils.model:load_valuehead_model",
    "verl.utils.profiler:simple_timer",
    "verl.utils.torch_functional:logprobs_from_logits_v2",
    "verl.workers.config:HFModelConfig",
    "verl.workers.config:RolloutConfig",
    "verl.workers.engine.base:EngineRegistry",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead",
    "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithValueHead",
    "verl.workers.rollout.base:BaseRollout",
    "verl.workers.rollout.base:_ROLLOUT_REGISTRY",
    "verl.workers.rollout.replica:RolloutReplica",
    "verl.workers.rollout.replica:RolloutReplicaRegistry",
    "verl.workers.rollout.replica:TokenOutput",
]

KEYS = [
    "actor_rollout_ref.actor.fsdp_config.model_dtype",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.model.custom_chat_template",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.agent.default_agent_loop",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.multi_turn.enable",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.name",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.val_kwargs.temperature",
    "algorithm.adv_estimator",
    "algorithm.use_kl_in_reward",
    "critic.enable",
    "critic.fsdp.strategy",
    "data.apply_chat_template_kwargs",
    "data.max_prompt_length",
    "data.prompt_key",
    "data.train_batch_size",
    "data.train_files",
    "reward.custom_reward_function.path",
    "reward.reward_manager.name",
    "reward.reward_manager.source",
    "reward.reward_model.enable_resource_pool",
    "reward.reward_model.model_path",
    "reward.reward_model.rollout.free_cache_engine",
    "trainer.default_local_dir",
    "trainer.device",
    "trainer.use_v1",
    "trainer.v1.sampler.custom_sampler.name",
    "trainer.v1.sampler.custom_sampler.path",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units",
]


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_symbol_is_where_we_import_it_from(symbol):
    module, name = symbol.split(":")
    assert hasattr(importlib.import_module(module), name), f"verl moved {symbol}"


@pytest.fixture(scope="module")
def config():
    return compose_recipe("rltr_planner", ["scale=cpu"])


@pytest.mark.parametrize("key", KEYS)
def test_config_key_exists(config, key):
    parent, _, name = key.rpartition(".")
    assert name in OmegaConf.select(config, parent), f"verl moved the config key {key}"


def test_calls_that_verl_makes_to_us_keep_their_shape():
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
    from verl.workers.rollout.replica import RolloutReplica, TokenOutput

    assert list(inspect.signature(RewardManagerBase.run_single).parameters) == ["self", "data"]
    assert {"token_ids", "log_probs", "stop_reason", "extra_fields"} <= set(TokenOutput.model_fields)
    assert {"wake_up", "sleep", "abort_all_requests", "resume_generation", "clear_kv_cache"} <= set(dir(RolloutReplica))


@pytest.mark.parametrize("name", ["ReplayBuffer", "ReplayBufferAsync"])
def test_the_replay_buffers_ask_our_overrides_what_they_expect(name):
    from verl.trainer.ppo.v1 import replay_buffer

    buffer = getattr(replay_buffer, name)
    overridden = {
        "sample": ["global_steps", "partition_id", "batch_size"],
        "_select_prompt_uids": ["partition_id", "sampleable_keys", "batch_size"],
        "_terminal_eviction_reasons": ["global_steps", "partition_id"],
        "_evict_terminal_groups": ["global_steps", "partition_id", "eviction_reasons"],
        "_wait_for_next_poll": ["partition_id", "last_debug_time"],
    }
    for method, parameters in overridden.items():
        assert list(inspect.signature(getattr(buffer, method)).parameters) == ["self", *parameters], method
    loop = buffer.sample if name == "ReplayBuffer" else buffer.wait_for_sampleable
    called = {*inspect.unwrap(loop).__code__.co_names, *inspect.unwrap(buffer.sample).__code__.co_names}
    assert set(overridden) - {"sample"} <= called


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_verls_merger_takes_our_arguments(backend, tmp_path, monkeypatch):
    from verl.model_merger.base_model_merger import generate_config_from_args, parse_args

    shards = Shards(tmp_path / "shards", backend, ())
    shards.settings.mkdir(parents=True)
    (shards.settings / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    command = merger_command(shards, tmp_path / "out", trust_remote_code=True)
    assert importlib.util.find_spec(f"{command[2]}.__main__"), "verl moved verl.model_merger"
    monkeypatch.setattr(sys, "argv", list(command[2:]))
    config = generate_config_from_args(parse_args())
    assert (config.operation, config.backend) == ("merge", backend)
    assert (config.local_dir, config.target_dir) == (str(shards.folder), str(tmp_path / "out"))
    assert config.hf_model_config_path == str(shards.settings)
    assert config.trust_remote_code and config.tie_word_embedding == (backend == "megatron")


def test_checkpoints_have_the_names_that_the_merge_looks_for():
    from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPConfig

    assert get_checkpoint_tracker_filename("run") == f"run/{TRACKER}"
    assert "world_size" in FSDPConfig.__dataclass_fields__


def test_verl_is_a_version_we_were_run_with():
    assert verl.__version__.startswith("0.9.")
