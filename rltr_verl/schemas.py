"""Tool schemas in OpenAI's form, and the check of a call's arguments against one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import jsonschema

from rltr_verl.errors import ConfigError
from rltr_verl.tool_parameters import check_parameters

Schema = Mapping[str, Any]


def schema_index(schemas: Iterable[Schema]) -> dict[str, dict[str, Any]]:
    """``{tool name: JSON schema of its arguments}`` of OpenAI function schemas; bare functions are taken too."""
    index = {}
    for schema in schemas:
        function = schema.get("function", schema)
        index[str(function.get("name"))] = dict(function.get("parameters") or {})
    return index


def schema_problem(schema: Any) -> str | None:
    """Why ``schema`` is no OpenAI tool schema whose arguments can be checked, or None if it is one."""
    function = schema.get("function", schema) if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return "it has no function with a name"
    parameters = function.get("parameters") or {}
    return _parameters_problem(json.dumps(parameters, sort_keys=True))


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
def _parameters_problem(text: str) -> str | None:
    try:
        check_parameters(json.loads(text), "it")
    except ConfigError as error:
        return _first_line(error.problem)
    return None


@lru_cache(maxsize=512)
def _compiled(text: str) -> Any:
    schema = json.loads(text)
    schema.setdefault("type", "object")
    return jsonschema.Draft202012Validator(schema)
