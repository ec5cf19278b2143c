"""How the columns of a data row are read; one reading for the preflight, the rollout and the cold start.

Parquet merges the structs of a column: every message and every tool schema gets the keys of all others, the missing
ones as None. A chat template that prints JSON would show them to the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from rltr_verl.errors import DataError


def without_none(value: Any) -> Any:
    """``value`` with every key that is None removed from every mapping inside; None inside a list is kept."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_none(item) for item in value]
    return value


def read_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages as the chat template gets them: plain dictionaries, without the keys that parquet added."""
    return [without_none(message) for message in messages]


def read_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """OpenAI tool schemas from JSON text, which parquet keeps as it is, or from structs, without the None it added.

    Returns None where the row has no tools.

    Raises:
        DataError: not JSON, or not a list of objects.
    """
    fix = "write the tools' OpenAI schemas as JSON text: json.dumps(schemas)."
    try:
        tools = json.loads(value) if isinstance(value, str) else without_none(value)
    except ValueError as error:
        raise DataError(f"is not valid JSON ({error})", where=where, fix=fix) from None
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError("is not a list of tool schemas", where=where, fix=fix)
    return tools
