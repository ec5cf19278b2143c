"""A row in verl's columns, as ``rltr data`` writes it, read as a query of the cold start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltr_verl.data.query import Query
from rltr_verl.errors import DataError
from rltr_verl.judge.checklist import parse_needs
from rltr_verl.rows import mended

if TYPE_CHECKING:
    from rltr_verl.rollout.turns import Planner

_TEXTS = ("id", "query", "difficulty", "reference", "prompt_version", "lang", "split")


def is_verl_file(path: Path) -> bool:
    """Whether it is a parquet file with a column ``prompt`` and none of queries; False where it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix.lower() != ".parquet":
        return False
    try:
        names = pq.read_schema(path).names
    except (OSError, pa.ArrowException):
        return False
    return "prompt" in names and "query" not in names


def is_verl_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is in verl's columns, right or wrong."""
    return "query" not in row and ("extra_info" in row or isinstance(row.get("prompt"), list))


def read_verl_row(
    row: Mapping[str, Any], number: int, where: str, planner: Planner
) -> tuple[Query, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """The query of a row (its tools are checked, and left out of it), its prompt and its ``extra_info``.

    Raises:
        DataError: names the field that is wrong.
    """
    prompt = [_message(message, where) for message in _list(row.get("prompt"), where)]
    info = _info(row.get("extra_info"), where)
    info = {"index": number, "split": "train", **info, "query": info.get("query") or _last_user(prompt, where)}
    try:
        planner.shown(info)
    except DataError as error:
        raise DataError(error.problem, where=where, fix=error.fix) from None
    needs = parse_needs(info.get("needs"), where)
    tools = None if needs is None else json.dumps([{"tool": need.tool} for need in needs])
    return Query(number, info["query"], info.get("id"), tools), (prompt, info)


def _list(prompt: Any, where: str) -> list[Any]:
    if not isinstance(prompt, list) or not prompt:
        fix = 'write [{"role": "user", "content": "..."}]; `rltr data` makes it from your queries.'
        problem = "no 'prompt'" if prompt is None else "field 'prompt' is no list of chat messages"
        raise DataError(problem, where=where, fix=fix)
    return prompt


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not all(_is_text(message.get(key)) for key in ("role", "content")):
        fix = 'write {"role": "user", "content": "..."}, both not empty.'
        raise DataError("field 'prompt' holds what is no chat message with content", where=where, fix=fix)
    return {key: mended(value) if isinstance(value, str) else value for key, value in message.items()}


def _info(info: Any, where: str) -> dict[str, Any]:
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise DataError("field 'extra_info' is no object", where=where, fix="write an object, or leave it out.")
    for name in _TEXTS:
        if not isinstance(info.get(name, ""), (str, type(None))):
            fix = "write a text, or leave it out."
            raise DataError(f"field 'extra_info.{name}' is no text", where=where, fix=fix)
    chosen = info.get("tool_selection")
    if chosen is not None and (not isinstance(chosen, list) or not all(isinstance(name, str) for name in chosen)):
        fix = "write a list of names of tools, or leave it out."
        raise DataError("field 'extra_info.tool_selection' is no list of names", where=where, fix=fix)
    return {key: mended(value) if isinstance(value, str) else value for key, value in info.items()}


def _last_user(prompt: list[dict[str, Any]], where: str) -> str:
    users = [message["content"] for message in prompt if message["role"] == "user"]
    if not users:
        fix = "add the user's message."
        raise DataError("field 'prompt' has no message of the role 'user'", where=where, fix=fix)
    return str(users[-1])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
