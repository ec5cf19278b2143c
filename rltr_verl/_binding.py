"""Settings from a recipe -> keyword arguments of a function or class, checked against its type hints."""

from __future__ import annotations

import difflib
import inspect
import keyword
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rltr_verl.errors import ConfigError


def bind_settings(
    function: Callable[..., Any], settings: Mapping[str, Any], where: str, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Keyword arguments for ``function``: ``settings`` checked by type, plus those of ``given`` that it asks for.

    A setting named like a Python keyword (``lambda``) is the parameter with an underscore behind it (``lambda_``).

    Raises:
        ConfigError: an unknown or missing setting or a value of the wrong type; ``where`` is the key path.
    """
    given = given or {}
    named = {name: item for name, item in inspect.signature(function).parameters.items() if item.kind in _NAMED}
    known = {_key(name): name for name in named if name not in given}
    hints = _hints(function)
    bound = {name: value for name, value in given.items() if name in named}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"unknown setting '{key}'", where=where, fix=_suggest(str(key), list(known)))
        bound[known[key]] = _checked(value, hints.get(known[key], Any), f"{where}.{key}")
    for key, name in known.items():
        if name not in bound and named[name].default is inspect.Parameter.empty:
            fix = f"add {where}.{key}=... (as an override of a recipe: +{where}.{key}=...)."
            raise ConfigError(f"setting '{key}' is missing", where=where, fix=fix)
    return bound


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _key(name: str) -> str:
    return name[:-1] if name.endswith("_") and keyword.iskeyword(name[:-1]) else name


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = function.__init__ if inspect.isclass(function) else function  # type: ignore[misc]
    return typing.get_type_hints(target, include_extras=True)


def _checked(value: Any, hint: Any, where: str) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        problem = f"{error.errors()[0]['msg'].lower()} (given: {value!r})"
        raise ConfigError(problem, where=where, fix="correct the value in the recipe or override.") from None


def _suggest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known: {', '.join(known) or 'none'}."
