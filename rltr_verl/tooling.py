"""Tools: how one is defined, found and described to the model.

A tool is a typed function with a docstring under :func:`tool`, in one file: a shipped one in ``tools/``, or a user's
own file or importable module. Ordinary parameters are what the model fills in; keyword-only parameters (after ``*``)
are settings, bound once from ``rltr.tool_settings.<name>``. The function may be ``async``. It returns text, and raises
:class:`rltr_verl.errors.BadArguments` or :class:`rltr_verl.errors.ToolFailed` where it cannot. A function given by
``@tool(check=...)`` tells before training starts whether the settings work.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import TypeAdapter

from rltr_verl._binding import bind_settings
from rltr_verl.errors import ConfigError, RltrError, ToolDefinitionError

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rltr_tool__"
_CHECK = "__rltr_check__"
_SHIPPED = "rltr_verl.tools"


@overload
def tool(function: F) -> F: ...


@overload
def tool(*, check: Callable[..., Any]) -> Callable[[F], F]: ...


def tool(function: F | None = None, *, check: Callable[..., Any] | None = None) -> F | Callable[[F], F]:
    """Mark ``function`` as a tool. It stays callable as it is; its name is the tool's name.

    Args:
        function: the tool.
        check: called before training starts with those of the tool's settings that it names; raises where the tool
            could not work with them, for example because a file is missing.

    Raises :class:`ToolDefinitionError`, naming file and line, when the docstring or a parameter's type is missing, or
    ``check`` takes something that is no setting of the tool.
    """
    if function is None:
        return functools.partial(_mark, check=check)
    return _mark(function, check)


def _mark(function: F, check: Callable[..., Any] | None) -> F:
    describe(function)
    if check is not None:
        others = set(inspect.signature(check).parameters) - set(_settings(function))
        if others:
            fix = "let it take keyword-only parameters of the tool."
            raise _undefined(function, f"has a check of '{min(others)}', which is no setting of it", fix)
    setattr(function, _MARK, True)
    setattr(function, _CHECK, check)
    return function


@dataclass(frozen=True)
class Tool:
    """A tool ready to be called: ``schema`` in OpenAI's form, ``call`` and ``check`` with the settings bound."""

    name: str
    schema: dict[str, Any]
    call: Callable[..., Any]
    is_async: bool = False
    check: Callable[[], Any] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.schema["function"]["parameters"]


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """OpenAI function schema of a tool: description from the docstring, arguments from the signature.

    An ``Args:`` section of the docstring describes the arguments. Keyword-only parameters do not appear.
    """
    text = inspect.getdoc(function)
    if not text:
        raise _undefined(function, "has no docstring", "write one: it is what the model reads to choose the tool.")
    summary, arguments = _split_docstring(text)
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _undefined(function, f"takes *{parameter.name}", "name each argument, the model has to fill it in.")
        if parameter.name not in hints:
            raise _undefined(function, f"has no type for '{parameter.name}'", "annotate it, for example with str.")
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        properties[parameter.name] = _property(parameter, hints[parameter.name], arguments.get(parameter.name))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    name = function.__name__
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def load_tools(names: Sequence[str], settings: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Tool]:
    """Load the tools a recipe lists, in the recipe's order (the order the model sees them in).

    Args:
        names: ``search`` (shipped), ``path/to/file.py`` (every tool in it) or ``package.module`` (every tool in it).
        settings: ``{tool name: {keyword-only parameter: value}}``.

    Raises:
        ConfigError: unknown tool, two tools of one name, settings for a tool or parameter that does not exist.
    """
    settings = settings or {}
    tools: dict[str, Tool] = {}
    for source in names:
        for function in _functions(source):
            name = function.__name__
            if name in tools:
                raise ConfigError(f"two tools are called '{name}'", where="rltr.tools", fix="rename one of them.")
            tools[name] = _bind(function, settings.get(name) or {})
    unknown = sorted(set(settings) - set(tools))
    if unknown:
        fix = f"list it under rltr.tools or remove its settings; tools here: {', '.join(tools) or 'none'}."
        raise ConfigError(
            f"settings for '{unknown[0]}', which is no tool of this recipe", where="rltr.tool_settings", fix=fix
        )
    return tools


def check_tools(tools: Mapping[str, Tool]) -> None:
    """Run the tools' own checks of their settings.

    Raises ConfigError naming the tool's settings for the first that could not work.
    """
    for name, item in tools.items():
        try:
            if item.check is not None:
                item.check()
        except RltrError as error:
            where = f"rltr.tool_settings.{name}"
            problem = f"{error.where}: {error.problem}" if error.where else error.problem
            raise ConfigError(problem, where=where, fix=error.fix or "correct the tool's settings.") from None
        except Exception as error:  # a user's check may raise anything; it is told, never swallowed
            problem = f"the tool's check failed ({type(error).__name__}: {error})"
            raise ConfigError(
                problem, where=f"rltr.tool_settings.{name}", fix="correct the tool's settings."
            ) from error


def schemas(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """The tools' OpenAI schemas in order, as the chat template takes them."""
    return [item.schema for item in tools.values()]


def shipped_tools() -> list[str]:
    """Names of the tools that come with the package: one file each in ``tools/``."""
    package = importlib.import_module(_SHIPPED)
    files = (path for folder in package.__path__ for path in Path(folder).glob("*.py"))
    return sorted(path.stem for path in files if not path.stem.startswith("_"))


def _functions(source: str) -> Iterable[Callable[..., Any]]:
    module = _module(source)
    found = [
        value for value in vars(module).values() if getattr(value, _MARK, False) and value.__module__ == module.__name__
    ]
    if not found:
        raise ConfigError(f"'{source}' defines no tool", where="rltr.tools", fix="put @tool above a function in it.")
    return sorted(found, key=lambda function: function.__code__.co_firstlineno)


def _module(source: str) -> Any:
    if source.endswith(".py"):
        return load_file(source, "rltr.tools")
    name = source if "." in source else f"{_SHIPPED}.{source}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
        fix = f"use one of {', '.join(shipped_tools())}, a path ending in .py, or an importable module."
        raise ConfigError(f"unknown tool '{source}'", where="rltr.tools", fix=fix) from None


def load_file(path: str, where: str) -> Any:
    """Import a user's file as a module of its own; the same file is imported once per process."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"no file '{path}'", where=where, fix=f"check the path; it was looked up as {file}.")
    name = "rltr_user_" + re.sub(r"\W", "_", str(file))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"'{path}' is no Python file", where=where, fix="give a file ending in .py.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _bind(function: Callable[..., Any], settings: Mapping[str, Any]) -> Tool:
    """Check the settings against the keyword-only parameters and bind them."""
    where = f"rltr.tool_settings.{function.__name__}"
    ordinary = [name for name in inspect.signature(function).parameters if name not in _settings(function)]
    bound = bind_settings(function, settings, where, given=dict.fromkeys(ordinary))
    values = {name: bound.get(name, parameter.default) for name, parameter in _settings(function).items()}
    call = functools.partial(function, **values)
    check = getattr(function, _CHECK, None)
    if check is not None:
        check = functools.partial(check, **{name: values[name] for name in inspect.signature(check).parameters})
    return Tool(function.__name__, describe(function), call, inspect.iscoroutinefunction(function), check)


def _settings(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters."""
    parameters = inspect.signature(function).parameters
    return {name: item for name, item in parameters.items() if item.kind is item.KEYWORD_ONLY}


def _property(parameter: inspect.Parameter, hint: Any, description: str | None) -> dict[str, Any]:
    schema = TypeAdapter(hint).json_schema()
    schema.pop("title", None)
    if parameter.default is not parameter.empty:
        schema["default"] = parameter.default
    if description:
        schema["description"] = description
    return json.loads(json.dumps(schema))


def _split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Summary (all text before ``Args:``) and the argument descriptions of a Google-style docstring."""
    head, _, tail = text.partition("\nArgs:")
    body = re.split(r"\n(?=\S)", tail)[0] if tail else ""
    arguments = dict(re.findall(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+)$", body, re.MULTILINE))
    summary = re.split(r"\n\s*(?:Returns|Raises):", head)[0]
    return " ".join(summary.split()), arguments


def _undefined(function: Callable[..., Any], problem: str, fix: str) -> ToolDefinitionError:
    code = getattr(function, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
    return ToolDefinitionError(f"tool '{getattr(function, '__name__', function)}' {problem}", where=where, fix=fix)
