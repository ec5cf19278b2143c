"""Tools: how one is defined, found and described to the model.

A tool is a typed function with a docstring under :func:`tool`, in one file: a shipped one in ``tools/``, or a user's
own file or importable module. Ordinary parameters are what the model fills in; keyword-only parameters (after ``*``)
are settings, bound once from ``rltr.tool_settings.<name>``. The function may be ``async``. It returns text, and raises
:class:`rltr_verl.errors.BadArguments` or :class:`rltr_verl.errors.ToolFailed` where it cannot. A function given by
``@tool(check=...)`` tells before training starts whether the settings work.

A tool with state is a class under :func:`tool`: each of its methods under :func:`tool` is a tool, and all of them work
on one object per trajectory. Keyword-only parameters of ``__init__`` are settings, ``rltr.tool_settings.<class name>``.
The object is made at the trajectory's first call; ``open(row)``, if there, is called next with the row's
``extra_info``, and ``close()``, if there, when the trajectory ends, however it ends. Each may be ``async``.

A module may also define ``provide_tools(*, ...) -> Sequence[Tool]``, for tools that are known only at run time; its
keyword-only parameters are settings, ``rltr.tool_settings.<module name>``. verl's own tools are taken as they are: a
YAML file of ``BaseTool`` entries, and Python files with ``@function_tool``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rltr_verl._binding import bind_settings
from rltr_verl.errors import ConfigError, RltrError
from rltr_verl.tool_definition import MARK, Mark, State, Tool, init_parameters, methods, tool
from rltr_verl.tool_files import load_file, module_of, shipped_tools
from rltr_verl.tool_parameters import check_parameters
from rltr_verl.tool_schema import describe, place, settings_of, undefined
from rltr_verl.tool_values import typed

__all__ = [
    "State",
    "Tool",
    "check_tools",
    "describe",
    "load_file",
    "load_tools",
    "schemas",
    "shipped_tools",
    "tool",
]

_PROVIDER = "provide_tools"


def load_tools(names: Sequence[str], settings: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Tool]:
    """Load the tools a recipe lists, in the recipe's order (the order the model sees them in).

    Args:
        names: ``search`` (shipped), ``path/to/file.py`` or ``package.module`` (every tool in it), or
            ``path/to/tools.yaml`` (verl's ``BaseTool`` entries).
        settings: ``{name of a tool, class or providing module: {keyword-only parameter: value}}``.

    Raises:
        ConfigError: unknown tool, two tools of one name, settings for a tool or parameter that does not exist.
    """
    settings = {name: value or {} for name, value in (settings or {}).items()}
    tools: dict[str, Tool] = {}
    known: dict[str, None] = {}
    for source in names:
        for owner, found in _load_source(source, settings):
            known[owner] = None
            for item in found:
                _add(tools, item)
    unknown = sorted(set(settings) - set(known))
    if unknown:
        fix = (
            f"list it under rltr.tools, or remove its settings (as an override of a recipe: "
            f"'~rltr.tool_settings.{unknown[0]}'); tools here: {', '.join(known) or 'none'}."
        )
        raise ConfigError(
            f"settings for '{unknown[0]}', which is no tool of this recipe", where="rltr.tool_settings", fix=fix
        )
    return tools


def check_tools(tools: Mapping[str, Tool]) -> None:
    """Run the tools' own checks of their settings.

    Raises ConfigError naming the tool's settings for the first that could not work.
    """
    for item in tools.values():
        name = item.state.name if item.state else item.name
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


def _add(tools: dict[str, Tool], item: Tool) -> None:
    _check_schema(item)
    if item.name in tools:
        first, second = tools[item.name].where, item.where
        both = f" ({first} and {second})" if first and second else ""
        raise ConfigError(f"two tools are called '{item.name}'{both}", where="rltr.tools", fix="rename one of them.")
    tools[item.name] = item


def _check_schema(item: Tool) -> None:
    """A schema that is none would end the rollout at the tool's first call."""
    function = item.schema.get("function")
    if not isinstance(function, dict) or function.get("name") != item.name or "parameters" not in function:
        form = f"{{'type': 'function', 'function': {{'name': '{item.name}', 'parameters': ...}}}}"
        raise ConfigError(f"tool '{item.name}' has no schema of its own", where=item.where, fix=f"give {form}.")
    check_parameters(item.parameters, f"tool '{item.name}'", item.where or "rltr.tools")


Found = Iterator[tuple[str, Sequence[Tool]]]
"""Pairs of whose settings they take and the tools."""


def _load_source(source: str, settings: Mapping[str, Mapping[str, Any]]) -> Found:
    if source.endswith((".yaml", ".yml")):
        from rltr_verl.rollout.verl_tools import yaml_tools

        yield source, yaml_tools(source)
        return
    module = module_of(source)
    empty = True
    for name, found in _from_module(module, settings):
        empty = False
        yield name, found
    if empty:
        raise ConfigError(f"'{source}' defines no tool", where="rltr.tools", fix="put @tool above a function in it.")


def _from_module(module: ModuleType, settings: Mapping[str, Mapping[str, Any]]) -> Found:
    for target in _marked(module):
        name = target.__name__
        yield (
            name,
            _bind_class(target, settings.get(name, {}))
            if inspect.isclass(target)
            else [_bind(target, settings.get(name, {}))],
        )
    provider = getattr(module, _PROVIDER, None)
    if callable(provider) and provider.__module__ == module.__name__:
        stem = _stem(module)
        values = bind_settings(provider, settings.get(stem, {}), f"rltr.tool_settings.{stem}")
        yield stem, _provided(provider, values)
    if "verl.tools.function_tool" in sys.modules:  # else nothing can have been registered with it
        from rltr_verl.rollout.verl_tools import function_tools

        for item in function_tools(module.__name__):
            yield item.name, [item]


def _provided(provider: Callable[..., Any], values: Mapping[str, Any]) -> list[Tool]:
    fix = "correct it; it must return a list of rltr_verl.tooling.Tool."
    try:
        found = list(provider(**values))
    except RltrError:
        raise
    except Exception as error:  # a user's function may raise anything; it is told, never swallowed
        problem = f"{_PROVIDER} failed ({type(error).__name__}: {error})"
        raise ConfigError(problem, where=place(provider), fix=fix) from error
    for item in found:
        if not isinstance(item, Tool):
            raise ConfigError(f"{_PROVIDER} gave a {type(item).__name__}, no Tool", where=place(provider), fix=fix)
    return found


def _stem(module: ModuleType) -> str:
    return Path(module.__file__ or module.__name__).stem


def _marked(module: ModuleType) -> Iterable[Callable[..., Any]]:
    """The module's own functions and classes under ``@tool``, in the order of its file."""
    values = {id(value): value for value in vars(module).values()}  # each once, whatever names it has
    own = [value for value in values.values() if getattr(value, "__module__", None) == module.__name__]
    for value in own:
        if inspect.isclass(value) and MARK not in vars(value) and any(MARK in vars(m) for m in methods(value)):
            raise undefined(
                value, "has methods under @tool and is not under @tool itself", "put @tool above the class."
            )
    return [value for value in own if isinstance(getattr(value, "__dict__", {}).get(MARK), Mark)]


def _bind(function: Callable[..., Any], settings: Mapping[str, Any]) -> Tool:
    """Check the settings against the keyword-only parameters and bind them."""
    where = f"rltr.tool_settings.{function.__name__}"
    ordinary = [name for name in inspect.signature(function).parameters if name not in settings_of(function)]
    values = _values(function, settings_of(function), settings, where, ordinary)
    mark: Mark = getattr(function, MARK)
    return Tool(
        name=function.__name__,
        schema=describe(function),
        call=functools.partial(typed(function), **values),
        is_async=inspect.iscoroutinefunction(function),
        check=_bound_check(mark, values),
        pure=mark.pure,
        where=place(function),
        bound_s=values[mark.bounded_by] if mark.bounded_by else None,
        at_once=mark.at_once,
    )


def _bind_class(cls: type, settings: Mapping[str, Any]) -> list[Tool]:
    """The tools of a class, all on one :class:`State`."""
    where = f"rltr.tool_settings.{cls.__name__}"
    values = _values(cls, {item.name: item for item in init_parameters(cls)}, settings, where)
    make = functools.partial(cls, **values)
    state = State(cls.__name__, make, getattr(cls, "open", None), getattr(cls, "close", None))
    check = _bound_check(getattr(cls, MARK), values)
    return [
        Tool(
            name=method.__name__,
            schema=describe(method),
            call=typed(method),
            is_async=inspect.iscoroutinefunction(method),
            check=check if index == 0 else None,
            state=state,
            where=place(method),
        )
        for index, method in enumerate(methods(cls))
    ]


def _values(
    target: Callable[..., Any],
    parameters: Mapping[str, inspect.Parameter],
    settings: Mapping[str, Any],
    where: str,
    given: Iterable[str] = (),
) -> dict[str, Any]:
    """A value for every setting: the recipe's, else the default."""
    bound = bind_settings(target, settings, where, given=dict.fromkeys(given))
    return {name: bound.get(name, parameter.default) for name, parameter in parameters.items()}


def _bound_check(mark: Mark, values: Mapping[str, Any]) -> Callable[[], Any] | None:
    if mark.check is None:
        return None
    return functools.partial(mark.check, **{name: values[name] for name in inspect.signature(mark.check).parameters})
