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
from rltr_verl.preflight import load_tokenizer, refuse_checkpoint, require_room
from rltr_verl.preflight_ranks import check_ranks

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
    """World, disk, model, every row as it will be trained and, if ``rltr.tools`` names tools, the prompts.

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
    _check_lora(config)
    tokenizer = _tokenizer(config)
    train, val = (_as_list(config.data.get(key)) for key in ("train_files", "val_files"))
    counts = {file: check_conversations(Path(file), str(config.data.messages_key)) for file in [*train, *val]}
    check_ranks(config, sum(counts[file] for file in train))
    for file in counts:
        _check_rows(file, tokenizer, config, settings)


def _check_lora(config: DictConfig) -> None:
    if int(config.model.get("lora_rank") or 0) > 0 and "hf_model" in config.checkpoint.save_contents:
        problem = "with LoRA, what verl saves as hf_model is loaded as an untrained model, without an error"
        fix = "add checkpoint.save_contents=[model,optimizer,extra], and then `rltr merge` the checkpoint."
        raise ConfigError(problem, where="checkpoint.save_contents", fix=fix)


def _as_list(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(map(str, value))


def _tokenizer(config: DictConfig) -> Any:
    """The model's tokenizer with the chat template that verl will use."""
    refuse_checkpoint(str(config.model.path), "model.path")
    tokenizer = load_tokenizer(str(config.model.get("tokenizer_path") or config.model.path))
    if config.model.get("custom_chat_template"):
        tokenizer.chat_template = config.model.custom_chat_template
    if not getattr(tokenizer, "chat_template", None):
        fix = "use an instruct model, or set model.custom_chat_template."
        raise ModelError("the tokenizer has no chat template", where=str(config.model.path), fix=fix)
    return tokenizer


def _check_rows(file: str, tokenizer: Any, config: DictConfig, settings: RltrSettings) -> None:
    """Every row can be trained, by the trainer's own code; the prompts are those of a planner with ``rltr.tools``."""
    from rich.console import Console
    from rich.progress import Progress

    from rltr_verl.rollout.sft_prompts import check_prompts, check_rows, open_dataset, require_rows
    from rltr_verl.rollout.turns import Planner

    data: Any = OmegaConf.to_container(config.data, resolve=True)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        dataset = open_dataset(file, tokenizer, data)
        task = progress.add_task(f"checking {Path(file).name}", total=len(dataset))
        require_rows(file, check_rows(dataset, lambda: progress.advance(task)))
    if settings.tools:
        planner = Planner.build(settings, tokenizer, data.get("apply_chat_template_kwargs"))
        check_prompts(file, tokenizer, planner, data=data)


def check_conversations(path: Path, key: str) -> int:
    """Every row of a parquet file is a conversation that an assistant ends. Returns the number of rows.

    Raises :class:`DataError` naming the row.
    """
    rows = _rows(path, key)
    for number, row in enumerate(rows):
        problem = _problem(row)
        if problem:
            fix = 'write [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...].'
            raise DataError(f"'{key}' {problem}", where=f"{path}, row {number}", fix=fix)
    return len(rows)


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
