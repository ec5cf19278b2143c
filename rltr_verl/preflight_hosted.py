"""The part of the preflight that is about the judge that verl serves (``judge=hosted``)."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from rltr_verl.config import RltrSettings
from rltr_verl.errors import ConfigError, ModelError

_NODE = "reward.reward_model"
_MODEL = f"{_NODE}.model_path"


def check_hosted_judge(config: DictConfig, settings: RltrSettings) -> None:
    """verl serves a model, in a pool of its own; it takes chats, its context holds a vote, and its GPUs are there.

    Raises:
        ConfigError: a key of ``reward.*`` with which no vote would be taken.
        ModelError: the model's folder is missing or has no chat template.
    """
    if settings.judge.backend != "hosted":
        return
    path = config.reward.reward_model.model_path
    if not path:
        raise ConfigError("a value is missing", where=_MODEL, fix=f"add {_MODEL}=FOLDER to the command line.")
    _require_served_apart(config)
    _require_gpus(config)
    _require_chat_template(path)
    _require_context(path, config)


def _require_served_apart(config: DictConfig) -> None:
    """What would let verl go past the reward manager, or leave the judge asleep."""
    wanted: dict[str, tuple[str, bool]] = {
        f"{_NODE}.enable": ("true", True),
        f"{_NODE}.enable_resource_pool": ("true", True),
        f"{_NODE}.rollout.free_cache_engine": ("false", False),
        "reward.custom_reward_function.path": ("pkg://rltr_verl.reward_manager", True),
    }
    for key, (value, truth) in wanted.items():
        if bool(OmegaConf.select(config, key)) is not truth:
            problem = f"with {OmegaConf.select(config, key)!r} verl does not let the model that it serves judge"
            raise ConfigError(problem, where=key, fix=f"leave it as judge=hosted sets it: {key}={value}")


def _require_gpus(config: DictConfig) -> None:
    """Only where the recipe itself declares how many there are; else Ray counts them and says so."""
    key = "ray_kwargs.ray_init.num_gpus"
    declared, judge = OmegaConf.select(config, key), config.reward.reward_model
    needed = config.trainer.n_gpus_per_node * config.trainer.nnodes + judge.n_gpus_per_node * judge.nnodes
    if declared is not None and declared < needed:
        problem = f"{declared} is less than the {needed} that trainer and judge take together"
        raise ConfigError(problem, where=key, fix=f"set {key}={needed}")


def _require_chat_template(path: str) -> None:
    from rltr_verl.preflight import load_tokenizer

    if not load_tokenizer(path, _MODEL).chat_template:
        fix = "serve an instruct model; a judge is asked in a chat."
        raise ModelError(f"'{path}' has no chat template", where=_MODEL, fix=fix)


def _require_context(path: str, config: DictConfig) -> None:
    from rltr_verl.preflight_context import positions

    asked, most = config.reward.reward_model.rollout.max_model_len, positions(path, _MODEL)
    if asked is not None and most is not None and asked > most:
        key = f"{_NODE}.rollout.max_model_len"
        raise ConfigError(f"the judge has positions for {most} tokens, not {asked}", where=key, fix=f"set {key}={most}")
