"""Whether a schema that was not read from a function is one that calls can be held against."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from rltr_verl.errors import ConfigError


def check_parameters(parameters: Any, whose: str, where: str = "", fix: str = "correct it.") -> None:
    """Raise :class:`ConfigError` for what is no JSON schema of an object, or refers to what is not in it.

    Warns of patterns that may take exponential time: calls are held against them in the rollout's event loop.
    """
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{whose} has a broken schema ({error.message})", where=where, fix=fix) from None
    kind = parameters.get("type", "object") if isinstance(parameters, dict) else parameters
    if kind != "object":
        raise ConfigError(f"{whose} has a schema of {kind!r}, not of an object", where=where, fix=fix)
    lost = _lost_references(parameters)
    if lost:
        raise ConfigError(f"{whose} has a schema that refers to {lost[0]}", where=where, fix=fix)
    for pattern in _patterns(parameters):
        if _REPEATS_REPEATS.search(pattern):
            _LOG.warning(
                "%s: the pattern %r repeats what repeats itself; a call made for it can hold up all trajectories. "
                "Fix: write it without, or drop it and let the tool check its argument.",
                whose,
                pattern,
            )


_LOG = logging.getLogger(__name__)
_REPEATS_REPEATS = re.compile(r"(?<!\\)(?:[*+]|\{\d*,\d*\})\)(?:[*+]|\{\d*,\d*\})")
"""``(a+)+`` and its like: a group that ends in a repetition and is repeated itself. Others, as ``(a|a)*``, pass."""


def _patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        yield from (key for key in schema.get("patternProperties") or () if isinstance(key, str))
    if isinstance(schema, dict | list):
        for inner in schema.values() if isinstance(schema, dict) else schema:
            yield from _patterns(inner)


def _lost_references(schema: dict[str, Any]) -> list[str]:
    resolver = Registry().with_resource("", DRAFT202012.create_resource(schema)).crawl().resolver("")
    return [ref for ref in _references(schema) if not ref.startswith("#") or not _leads(resolver, ref)]


def _leads(resolver: Any, reference: str) -> bool:
    try:
        resolver.lookup(reference)
    except Unresolvable:
        return False
    return True


def _references(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        return own + [ref for value in schema.values() for ref in _references(value)]
    return [ref for item in schema for ref in _references(item)] if isinstance(schema, list) else []
