"""The one coercion of a call's arguments.

An argument that its schema refuses is replaced where exactly one of these makes it valid:

- a string that is, character for character, the JSON of a number or boolean (``"30"``, ``"2.5"``, ``"true"``) becomes
  that number or boolean;
- a number becomes its JSON text (``2662`` becomes ``"2662"``).

Nothing else is changed: no blanks trimmed, no ``"yes"`` for true, no list for an element, nothing inside of lists and
objects. What is still refused then is the policy's mistake. A whole number that the schema takes for an integer
although it is written ``30.0`` reaches the tool as ``30``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rltr_verl.schemas import argument_problem

_MISSING = object()


def coerced(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """``arguments`` with the coercion above applied to each that breaks its schema in ``parameters``."""
    properties = parameters.get("properties") or {}
    root = {key: parameters[key] for key in _ROOT if key in parameters}
    return {name: _one(name, properties.get(name), root, value) for name, value in arguments.items()}


def _one(name: str, schema: Any, root: Mapping[str, Any], value: Any) -> Any:
    if not isinstance(schema, Mapping) or not isinstance(value, str | int | float) or isinstance(value, bool):
        return value
    if not _fits(name, schema, root, value):
        other = _from_text(value) if isinstance(value, str) else _to_text(value)
        if other is _MISSING or not _fits(name, schema, root, other):
            return value
        value = other
    whole = isinstance(value, float) and value.is_integer() and schema.get("type") == "integer"
    return int(value) if whole else value


def _fits(name: str, schema: Mapping[str, Any], root: Mapping[str, Any], value: Any) -> bool:
    if schema.get("type") == "string" and len(schema.keys() - _HARMLESS) == 1:  # nearly every argument there is
        return isinstance(value, str)
    return argument_problem(root, {name: value}) is None


_ROOT = ("$id", "$defs", "definitions", "properties")
"""What of a schema one argument alone is held against; references (``#/definitions/A``) lead from the root."""

_HARMLESS = frozenset({"title", "description", "default"})


def _from_text(text: str) -> Any:
    """The number or boolean whose JSON ``text`` is, else ``_MISSING``."""
    if not text or text != text.strip():
        return _MISSING
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _MISSING
    return value if isinstance(value, int | float) and abs(value) != float("inf") else _MISSING


def _to_text(value: float) -> Any:
    return json.dumps(value) if abs(value) < float("inf") else _MISSING


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
