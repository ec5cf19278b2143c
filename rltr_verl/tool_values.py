"""From the JSON of a call to the types that a tool's function asks for."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rltr_verl.errors import BadArguments
from rltr_verl.tool_schema import own_parameters, type_hints


def typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, handed values of its parameters' types where these are made from JSON: a date from its text, a
    model or dataclass from an object, an Enum from its value. A value that the type refuses is :class:`BadArguments`.
    """
    hints = type_hints(function)
    ordinary = [item.name for item in own_parameters(function) if item.kind is not item.KEYWORD_ONLY]
    adapters = {name: TypeAdapter(hints[name]) for name in ordinary if not _is_plain(hints[name])}
    if not adapters:
        return function

    @functools.wraps(function)
    def call(*args: Any, **arguments: Any) -> Any:
        made = {name: _made(name, adapters[name], value) for name, value in arguments.items() if name in adapters}
        return function(*args, **{**arguments, **made})

    return call


_PLAIN = (str, int, float, bool, list, dict, None, type(None), Any, object)


def _is_plain(hint: Any) -> bool:
    """Whether the type is what JSON gives."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _is_plain(typing.get_args(hint)[0])
    if origin in (list, dict, typing.Union, types.UnionType):
        inner = typing.get_args(hint)
        return all(map(_is_plain, inner)) and not (origin is dict and inner[0] not in (str, Any))
    return origin is typing.Literal or hint in _PLAIN


def _made(name: str, adapter: TypeAdapter[Any], value: Any) -> Any:
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (name, *first["loc"])))
        raise BadArguments(f"'{place}': {first['msg'].lower()}") from None
