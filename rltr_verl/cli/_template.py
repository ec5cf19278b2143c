"""The chat template that a command works with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rltr_verl.errors import ConfigError, DataError


def read_tokenizer(model: str, chat_template: Path | None) -> Any:
    """The tokenizer of ``--model``, with the template in the file ``chat_template`` if there is one.

    Raises:
        ModelError, DataError: one of the two cannot be read.
    """
    from rltr_verl.preflight import load_tokenizer

    tokenizer = load_tokenizer(model, where="--model")
    if chat_template:
        try:
            tokenizer.chat_template = chat_template.read_text("utf-8")
        except OSError as error:
            raise DataError(
                f"cannot be read ({error.strerror})", where=str(chat_template), fix="check the path."
            ) from None
    return tokenizer


def read_template_arguments(text: str) -> dict[str, Any]:
    """The JSON object of ``--template-kwargs``. Raises ConfigError if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{text!r} is no JSON object", where="--template-kwargs", fix='write {"enable_thinking": false}.'
        )
    return value
