"""Tool schemas in OpenAI's form, and the check of a call's arguments against one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import jsonschema

Schema = Mapping[str, Any]


def schema_index(schemas: Iterable[Schema]) -> dict[str, dict[str, Any]]:
    """``{tool name: JSON schema of its arguments}`` of OpenAI function schemas; bare functions are taken too."""
    index = {}
    for schema in schemas:
        function = schema.get("function", schema)
        index[str(function.get("name"))] = dict(function.get("parameters") or {})
    return index


def argument_problem(parameters: Schema, arguments: Mapping[str, Any]) -> str | None:
    """Why ``arguments`` break the schema ``parameters``, or None if they do not.

    A required string that is empty or blank counts as missing: it asks the tool nothing.
    """
    for name in parameters.get("required") or ():
        value = arguments.get(name)
        if isinstance(value, str) and not value.strip():
            return f"'{name}' is empty"
    error = jsonschema.exceptions.best_match(_validator(parameters).iter_errors(dict(arguments)))
    return None if error is None else _first_line(error.message)


def _first_line(message: str) -> str:
    line = message.splitlines()[0]
    return line if len(line) <= 200 else line[:197] + "..."


def _validator(parameters: Schema) -> Any:
    return _compiled(json.dumps(parameters, sort_keys=True))


@lru_cache(maxsize=512)
def _compiled(text: str) -> Any:
    schema = json.loads(text)
    schema.setdefault("type", "object")
    return jsonschema.Draft202012Validator(schema)
