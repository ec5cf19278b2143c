"""Checks before verl's SFT trainer starts; the counterpart of :mod:`rltr_verl.preflight` for the cold start."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from rltr_verl.config import RltrSettings, from_omegaconf
from rltr_verl.errors import ConfigError, DataError, ModelError, RltrError
from rltr_verl.preflight import load_tokenizer, require_room

ROLES = ("system", "user", "assistant", "tool")


class SftPreflightCallback(Callback):
    """Runs :func:`check_sft` when Hydra starts the job. Hydra swallows exceptions of callbacks, hence ``sys.exit``."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        own = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        try:
            check_sft(own)
        except RltrError as error:
            sys.exit(f"\n[rltr_verl] {type(error).__name__}: {error}\n")


def check_sft(config: DictConfig) -> None:
    """World, disk, model, every conversation and, if ``rltr.tools`` names the planner's tools, the prompts.

    Raises :class:`RltrError` (ConfigError, WorldError, DiskError, ModelError, DataError, GateError) for the first
    problem.
    """
    settings = from_omegaconf(config)
    for key in ("data.train_files", "model.path"):
        if OmegaConf.select(config, key, throw_on_missing=False) is None:
            raise ConfigError("a value is missing", where=key, fix=f"add {key}=... to the command line.")
    if settings.world is not None:
        from rltr_verl.world import load_world

        load_world(settings.world)
    require_room(Path(config.trainer.default_local_dir), "trainer.default_local_dir")
    tokenizer = _tokenizer(config)
    files = config.data.train_files
    for file in [files] if isinstance(files, str) else list(files):
        check_conversations(Path(str(file)), str(config.data.messages_key))
        if settings.tools:
            _check_prompts(str(file), tokenizer, config, settings)


def _tokenizer(config: DictConfig) -> Any:
    """The model's tokenizer with the chat template that verl will use."""
    tokenizer = load_tokenizer(str(config.model.get("tokenizer_path") or config.model.path))
    if config.model.get("custom_chat_template"):
        tokenizer.chat_template = config.model.custom_chat_template
    if not getattr(tokenizer, "chat_template", None):
        fix = "use an instruct model, or set model.custom_chat_template."
        raise ModelError("the tokenizer has no chat template", where=str(config.model.path), fix=fix)
    return tokenizer


def _check_prompts(file: str, tokenizer: Any, config: DictConfig, settings: RltrSettings) -> None:
    """The first conversations' prompts are those that a planner with the tools of ``rltr.tools`` will be shown."""
    from rltr_verl.rollout.sft_prompts import check_prompts
    from rltr_verl.rollout.turns import Planner

    data = OmegaConf.to_container(config.data, resolve=True)
    assert isinstance(data, dict)
    planner = Planner.build(settings, tokenizer, data.get("apply_chat_template_kwargs"))
    check_prompts(file, tokenizer, planner, data={str(key): value for key, value in data.items()})


def check_conversations(path: Path, key: str) -> None:
    """Every row of a parquet file is a conversation that an assistant ends.

    Raises :class:`DataError` naming the row.
    """
    for number, row in enumerate(_rows(path, key)):
        problem = _problem(row)
        if problem:
            fix = 'write [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...].'
            raise DataError(f"'{key}' {problem}", where=f"{path}, row {number}", fix=fix)


def _rows(path: Path, key: str) -> list[Any]:
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        fix = "check the path; `rltr world build` makes the offline world's."
        raise DataError(f"no file '{path}'", where="data.train_files", fix=fix)
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"cannot be read ({error})", where=str(path), fix="give verl parquet files.") from None
    if key not in table.column_names:
        fix = f"rename the column, or set data.messages_key; columns here: {', '.join(table.column_names)}."
        raise DataError(f"no column '{key}'", where=str(path), fix=fix)
    if not table.num_rows:
        raise DataError("the file holds no rows", where=str(path), fix="write at least one conversation.")
    return table.column(key).to_pylist()


def _problem(messages: Any) -> str | None:
    """What is wrong with a conversation, or None."""
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        return "is not a list of messages"
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            return f"message {index} has role {message.get('role')!r}, known are {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            return f"message {index} has no content"
    if not messages or messages[-1]["role"] != "assistant":
        return "does not end with an assistant message"
    return None
