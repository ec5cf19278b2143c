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
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from rltr_verl._binding import bind_settings
from rltr_verl.errors import ConfigError, RltrError
from rltr_verl.tool_parameters import check_parameters
from rltr_verl.tool_schema import describe, own_parameters, place, settings_of, undefined
from rltr_verl.tool_values import typed

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__rltr_tool__"
_SHIPPED = "rltr_verl.tools"
_PROVIDER = "provide_tools"


@dataclass(frozen=True)
class _Mark:
    """What the decorator was told."""

    check: Callable[..., Any] | None
    pure: bool
    bounded_by: str | None = None


@dataclass(frozen=True, eq=False)
class State:
    """The object behind tools with state, one a trajectory; tools that hold the same ``State`` share it.

    ``make()`` gives the object, ``open(object, row)`` prepares it, ``close(object)`` ends it; each may be async.
    """

    name: str
    make: Callable[[], Any]
    open: Callable[[Any, Mapping[str, Any]], Any] | None = None
    close: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Tool:
    """A tool ready to be called: ``schema`` in OpenAI's form, ``call`` and ``check`` with the settings bound.

    ``call(**arguments)``; with a ``state``, ``call(object, **arguments)``. ``pure``: equal arguments give equal
    results, so that they may be kept. ``bound_s``: wall seconds after which the tool itself ends a call, if it does.
    ``where`` is the file and line of its definition.
    """

    name: str
    schema: dict[str, Any]
    call: Callable[..., Any]
    is_async: bool = False
    check: Callable[[], Any] | None = None
    pure: bool = False
    state: State | None = None
    where: str = ""
    bound_s: float | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.schema["function"]["parameters"]


@overload
def tool(target: F) -> F: ...


@overload
def tool(
    *, check: Callable[..., Any] | None = None, pure: bool = False, bounded_by: str | None = None
) -> Callable[[F], F]: ...


def tool(
    target: F | None = None,
    *,
    check: Callable[..., Any] | None = None,
    pure: bool = False,
    bounded_by: str | None = None,
) -> F | Callable[[F], F]:
    """Mark a function, a class or a method of such a class as a tool; it stays usable as it is.

    The name of the function or method is the tool's name.

    Args:
        target: the tool.
        check: called before training starts with those of the tool's settings that it names; raises where the tool
            could not work with them, for example because a file is missing.
        pure: equal arguments always give equal results; the runner then keeps them.
        bounded_by: the setting that holds the wall seconds after which the tool itself ends a call and says so. A
            recipe whose runner would end the call first is refused.

    Raises :class:`ToolDefinitionError`, naming file and line, when the docstring or a parameter's type is missing,
    ``check`` takes something that is no setting of the tool, or a class has no method under ``@tool``.
    """
    if target is None:
        return functools.partial(_mark, mark=_Mark(check, pure, bounded_by))
    return _mark(target, _Mark(check, pure, bounded_by))


def _mark(target: F, mark: _Mark) -> F:
    if inspect.isclass(target):
        _check_class(target, mark)
    else:
        _check_function(target, mark)
    if mark.check is not None:
        others = set(inspect.signature(mark.check).parameters) - set(_settings(target))
        if others:
            fix = "let it take keyword-only parameters of the tool."
            raise undefined(target, f"has a check of '{min(others)}', which is no setting of it", fix)
    if mark.bounded_by is not None and mark.bounded_by not in _settings(target):
        fix = "name a keyword-only parameter of the tool."
        raise undefined(target, f"is bounded by '{mark.bounded_by}', which is no setting of it", fix)
    setattr(target, _MARK, mark)
    return target


def _check_function(function: Callable[..., Any], mark: _Mark) -> None:
    describe(function)
    _check_first(function)
    if len(own_parameters(function)) == len(inspect.signature(function).parameters):
        return
    if settings_of(function):
        raise undefined(function, "is a method with settings", "let __init__ take the keyword-only parameters.")
    if mark.pure or mark.check:
        raise undefined(function, "is a method, so it is not pure and has no check of its own", "drop pure and check.")


def _check_first(function: Callable[..., Any]) -> None:
    """A second tool of one name in a file would take the place of the first unseen."""
    earlier = getattr(function, "__globals__", {}).get(getattr(function, "__qualname__", ""))
    if earlier is None or not isinstance(getattr(earlier, "__dict__", {}).get(_MARK), _Mark):
        return
    file, other = (item.rpartition(":")[0] for item in (place(function), place(earlier)))
    if file == other and place(function) != place(earlier):
        raise undefined(function, f"is defined twice; first at {place(earlier)}", "rename one of them.")


def _check_class(cls: type, mark: _Mark) -> None:
    for item in vars(cls).values():
        if isinstance(item, staticmethod | classmethod) and (_MARK in vars(item) or _MARK in vars(item.__func__)):
            raise undefined(item.__func__, "is a static or class method", "make it a method that takes self.")
    if not _methods(cls):
        raise undefined(cls, "is a class without a method under @tool", "put @tool above each method the model calls.")
    if mark.pure:
        raise undefined(cls, "is a class, so it is not pure", "drop pure, or write a function.")
    given = [item.name for item in _init_parameters(cls) if item.kind is not item.KEYWORD_ONLY]
    if given:
        fix = "make it keyword-only (behind *), so that it is a setting."
        raise undefined(cls, f"has an __init__ that takes '{given[0]}'", fix)


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
        fix = f"list it under rltr.tools or remove its settings; tools here: {', '.join(known) or 'none'}."
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


def shipped_tools() -> list[str]:
    """Names of the tools that come with the package: one file each in ``tools/``."""
    package = importlib.import_module(_SHIPPED)
    files = (path for folder in package.__path__ for path in Path(folder).glob("*.py"))
    return sorted(path.stem for path in files if not path.stem.startswith("_"))


def load_file(path: str, where: str) -> ModuleType:
    """Import a user's file as a module of its own; the same file is imported once per process.

    Raises ConfigError when there is no such file or it cannot be imported, naming its line.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"no file '{path}'", where=where, fix=f"check the path; it was looked up as {file}.")
    # the digest tells a/b_c.py from a/b/c.py
    name = f"rltr_user_{re.sub(r'[^0-9A-Za-z]', '_', file.stem)}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:16]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ConfigError(f"'{path}' is no Python file", where=where, fix="give a file ending in .py.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if isinstance(error, RltrError) or not isinstance(error, Exception | SystemExit):
                raise
            problem = f"the file cannot be imported ({type(error).__name__}: {error})"
            raise ConfigError(problem, where=_line_of(error, file), fix="correct it; python FILE shows it.") from error
    return sys.modules[name]


def _line_of(error: BaseException, file: Path | None = None) -> str:
    """``file:line`` where importing ``file`` failed; without one, of the last line of a file that is no importer."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [item for item in traceback.extract_tb(error.__traceback__) if not _imports(item.filename)]
    lines = [f"{item.filename}:{item.lineno}" for item in frames if file is None or item.filename == str(file)]
    return lines[-1] if lines else str(file or "rltr.tools")


def _imports(filename: str) -> bool:
    return filename.startswith("<frozen ") or filename in (__file__, importlib.__file__)


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
    module = _module(source)
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
        if inspect.isclass(value) and _MARK not in vars(value) and any(_MARK in vars(m) for m in _methods(value)):
            raise undefined(
                value, "has methods under @tool and is not under @tool itself", "put @tool above the class."
            )
    return [value for value in own if isinstance(getattr(value, "__dict__", {}).get(_MARK), _Mark)]


def _module(source: str) -> ModuleType:
    if source.endswith(".py"):
        return load_file(source, "rltr.tools")
    name = source if "." in source else f"{_SHIPPED}.{source}"
    fix = f"use one of {', '.join(shipped_tools())}, a path ending in .py, or an importable module."
    unknown = ConfigError(f"unknown tool '{source}'", where="rltr.tools", fix=fix)
    if not all(name.split(".")):
        raise unknown
    try:
        return importlib.import_module(name)
    except RltrError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything; it is told, never swallowed
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise unknown from None
        problem = f"'{source}' cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(
            problem, where=_line_of(error), fix=f"correct it; python -c 'import {name}' shows it."
        ) from error


def _bind(function: Callable[..., Any], settings: Mapping[str, Any]) -> Tool:
    """Check the settings against the keyword-only parameters and bind them."""
    where = f"rltr.tool_settings.{function.__name__}"
    ordinary = [name for name in inspect.signature(function).parameters if name not in settings_of(function)]
    values = _values(function, settings_of(function), settings, where, ordinary)
    mark: _Mark = getattr(function, _MARK)
    return Tool(
        name=function.__name__,
        schema=describe(function),
        call=functools.partial(typed(function), **values),
        is_async=inspect.iscoroutinefunction(function),
        check=_bound_check(mark, values),
        pure=mark.pure,
        where=place(function),
        bound_s=values[mark.bounded_by] if mark.bounded_by else None,
    )


def _bind_class(cls: type, settings: Mapping[str, Any]) -> list[Tool]:
    """The tools of a class, all on one :class:`State`."""
    where = f"rltr.tool_settings.{cls.__name__}"
    values = _values(cls, {item.name: item for item in _init_parameters(cls)}, settings, where)
    make = functools.partial(cls, **values)
    state = State(cls.__name__, make, getattr(cls, "open", None), getattr(cls, "close", None))
    check = _bound_check(getattr(cls, _MARK), values)
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
        for index, method in enumerate(_methods(cls))
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


def _bound_check(mark: _Mark, values: Mapping[str, Any]) -> Callable[[], Any] | None:
    if mark.check is None:
        return None
    return functools.partial(mark.check, **{name: values[name] for name in inspect.signature(mark.check).parameters})


def _settings(target: Callable[..., Any]) -> list[str]:
    if inspect.isclass(target):
        return [item.name for item in _init_parameters(target)]
    return list(settings_of(target))


def _init_parameters(cls: type) -> list[inspect.Parameter]:
    """Parameters of ``__init__`` without ``self``; none if the class has no ``__init__`` of its own."""
    return [] if cls.__init__ is object.__init__ else list(inspect.signature(cls).parameters.values())  # type: ignore[misc]


def _methods(cls: type) -> list[Callable[..., Any]]:
    """Methods under ``@tool``, inherited ones too, as they stand in the file."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    members = (inspect.getattr_static(cls, name) for name in names)
    return [item for item in members if inspect.isfunction(item) and isinstance(vars(item).get(_MARK), _Mark)]
