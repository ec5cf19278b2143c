"""A tool's schema, read from its signature and docstring."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable
from typing import Any

from pydantic import PydanticUserError, TypeAdapter

from rltr_verl.errors import ToolDefinitionError


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """OpenAI function schema of a tool: description from the docstring, arguments from the signature.

    An ``Args:`` section of the docstring describes the arguments. Keyword-only parameters do not appear, nor does the
    ``self`` of a method.

    Raises :class:`ToolDefinitionError`, naming file and line, when the docstring or a parameter's type is missing or
    has no JSON form.
    """
    text = inspect.getdoc(function)
    if not text or not text.strip():
        raise undefined(function, "has no docstring", "write one: it is what the model reads to choose the tool.")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise undefined(function, "yields its result in parts", "return the whole text.")
    summary, arguments = _split_docstring(text)
    hints = type_hints(function)
    parameters: dict[str, Any] = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    for parameter in own_parameters(function):
        _check_parameter(function, parameter, hints)
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        schema = _property(function, parameter, hints[parameter.name], arguments.get(parameter.name))
        parameters.setdefault("$defs", {}).update(schema.pop("$defs", {}))  # references start at the root
        parameters["properties"][parameter.name] = schema
        if parameter.default is parameter.empty:
            parameters["required"].append(parameter.name)
    if not parameters.get("$defs", True):
        del parameters["$defs"]
    name = function.__name__
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def own_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters, without the ``self`` of a method."""
    parameters = list(inspect.signature(function).parameters.values())
    return parameters[1:] if is_method(function) else parameters


def settings_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters."""
    return {item.name: item for item in own_parameters(function) if item.kind is item.KEYWORD_ONLY}


def is_method(function: Callable[..., Any]) -> bool:
    """Whether ``function`` was defined in a class's body."""
    parent = getattr(function, "__qualname__", "").rpartition(".")[0]
    return bool(parent) and not parent.endswith("<locals>")


def place(target: Callable[..., Any]) -> str:
    """``file:line`` of a function or class, as far as it is known."""
    code = getattr(target, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return repr(target)


def undefined(target: Callable[..., Any], problem: str, fix: str) -> ToolDefinitionError:
    """The error for a tool that is not defined as it should be."""
    name = getattr(target, "__name__", target)
    return ToolDefinitionError(f"tool '{name}' {problem}", where=place(target), fix=fix)


def type_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function's parameters. Raises :class:`ToolDefinitionError` for one that cannot be read."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise undefined(function, f"has a type that cannot be read ({error})", "import what it names.") from None


def _check_parameter(function: Callable[..., Any], parameter: inspect.Parameter, hints: dict[str, Any]) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise undefined(function, f"takes *{parameter.name}", "name each argument, the model has to fill it in.")
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise undefined(function, f"takes '{parameter.name}' by position only", "remove the / from its parameters.")
    if parameter.name not in hints:
        raise undefined(function, f"has no type for '{parameter.name}'", "annotate it, for example with str.")


def _property(
    function: Callable[..., Any], parameter: inspect.Parameter, hint: Any, description: str | None
) -> dict[str, Any]:
    try:
        schema = TypeAdapter(hint).json_schema()
        schema.pop("title", None)
        if parameter.default is not parameter.empty:
            schema["default"] = parameter.default
        if description:
            schema["description"] = description
        return json.loads(json.dumps(schema, allow_nan=False))
    except (PydanticUserError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        fix = "use types that JSON has: str, int, float, bool, list, dict, Literal, and defaults of these."
        raise undefined(
            function, f"has a type or default of '{parameter.name}' without JSON form ({reason})", fix
        ) from None


def _split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Summary (all text before ``Args:``) and the argument descriptions of a Google-style docstring."""
    head, _, tail = text.partition("\nArgs:")
    body = re.split(r"\n(?=\S)", tail)[0] if tail else ""
    arguments = dict(re.findall(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)$", body, re.MULTILINE))
    summary = re.split(r"\n\s*(?:Returns|Raises):", head)[0]
    return " ".join(summary.split()), arguments
