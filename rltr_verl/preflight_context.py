"""The part of the preflight that is about context lengths: has the model a position for every token?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rltr_verl.errors import ConfigError, ModelError


def check_context(config: DictConfig) -> int | None:
    """The model has a position for every token of the longest trajectory. Returns how many positions it has.

    Raises ConfigError if ``data.max_prompt_length + data.max_response_length``, or ``rollout.max_model_len``, is more,
    and ModelError if the model's ``config.json`` cannot be read.
    """
    model = config.actor_rollout_ref.model
    most = positions(str(model.path), "actor_rollout_ref.model.path", model.get("override_config"))
    if most is None:
        return None
    length = int(config.data.max_prompt_length) + int(config.data.max_response_length)
    asked = config.actor_rollout_ref.rollout.get("max_model_len")
    fix = "lower them, or take a model with a longer context."
    if length > most:
        sum_of = f"{config.data.max_prompt_length} + {config.data.max_response_length}"
        problem = f"prompt and response take up to {sum_of} = {length} tokens, the model has positions for {most}"
        raise ConfigError(problem, where="data.max_prompt_length + data.max_response_length", fix=fix)
    if asked is not None and asked > most:
        where = "actor_rollout_ref.rollout.max_model_len"
        raise ConfigError(
            f"the model has positions for {most} tokens, not {asked}", where=where, fix=f"set it to {most}."
        )
    return most


def positions(path: str, where: str, override: Mapping[str, Any] | None = None) -> int | None:
    """How many tokens a model can hold: ``max_position_embeddings``, times the factor of a scaled RoPE.

    Args:
        path: folder or hub name.
        where: the setting that names it.
        override: keys of its ``config.json`` that the run sets.

    Returns None if the model does not say. Raises ModelError if its ``config.json`` cannot be read.
    """
    from transformers import AutoConfig

    local = Path(path).expanduser()
    try:
        found = AutoConfig.from_pretrained(str(local) if local.is_dir() else path)
    except (OSError, ValueError) as error:
        fix = "give a folder with config.json and tokenizer files, or a model name that can be downloaded from here."
        problem = f"'{path}' has no usable config.json ({str(error).splitlines()[0]})"
        raise ModelError(problem, where=where, fix=fix) from None
    given = {**vars(found.get_text_config()), **(override or {})}
    most = given.get("max_position_embeddings")
    scaling = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(most, int):
        return None
    return max(most, int((scaling.get("original_max_position_embeddings") or most) * (scaling.get("factor") or 1)))
