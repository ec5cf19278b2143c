"""What a tool is: the decorator that makes one of a function or class, and the record that a runner calls."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from rltr_verl.tool_schema import describe, own_parameters, place, settings_of, undefined

F = TypeVar("F", bound=Callable[..., Any])
MARK = "__rltr_tool__"
"""Attribute of what is under the decorator; its value is a :class:`Mark`."""


@dataclass(frozen=True)
class Mark:
    """What the decorator was told."""

    check: Callable[..., Any] | None
    pure: bool
    bounded_by: str | None = None
    at_once: int | None = None


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
    ``at_once``: calls that it can serve at once, if it says so. ``where`` is the file and line of its definition.
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
    at_once: int | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.schema["function"]["parameters"]


@overload
def tool(target: F) -> F: ...


@overload
def tool(
    *,
    check: Callable[..., Any] | None = None,
    pure: bool = False,
    bounded_by: str | None = None,
    at_once: int | None = None,
) -> Callable[[F], F]: ...


def tool(
    target: F | None = None,
    *,
    check: Callable[..., Any] | None = None,
    pure: bool = False,
    bounded_by: str | None = None,
    at_once: int | None = None,
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
        at_once: calls that the tool can serve at once; further ones wait for their turn, and their time has not begun.
            The recipe's own ``tool_limits.<tool>.concurrency`` stands over it.

    Raises :class:`ToolDefinitionError`, naming file and line, when the docstring or a parameter's type is missing,
    ``check`` takes something that is no setting of the tool, or a class has no method under ``@tool``.
    """
    mark = Mark(check, pure, bounded_by, at_once)
    return functools.partial(_mark, mark=mark) if target is None else _mark(target, mark)


def _mark(target: F, mark: Mark) -> F:
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
    setattr(target, MARK, mark)
    return target


def _check_function(function: Callable[..., Any], mark: Mark) -> None:
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
    if earlier is None or not isinstance(getattr(earlier, "__dict__", {}).get(MARK), Mark):
        return
    file, other = (item.rpartition(":")[0] for item in (place(function), place(earlier)))
    if file == other and place(function) != place(earlier):
        raise undefined(function, f"is defined twice; first at {place(earlier)}", "rename one of them.")


def _check_class(cls: type, mark: Mark) -> None:
    for item in vars(cls).values():
        if isinstance(item, staticmethod | classmethod) and (MARK in vars(item) or MARK in vars(item.__func__)):
            raise undefined(item.__func__, "is a static or class method", "make it a method that takes self.")
    if not methods(cls):
        raise undefined(cls, "is a class without a method under @tool", "put @tool above each method the model calls.")
    if mark.pure:
        raise undefined(cls, "is a class, so it is not pure", "drop pure, or write a function.")
    given = [item.name for item in init_parameters(cls) if item.kind is not item.KEYWORD_ONLY]
    if given:
        fix = "make it keyword-only (behind *), so that it is a setting."
        raise undefined(cls, f"has an __init__ that takes '{given[0]}'", fix)


def _settings(target: Callable[..., Any]) -> list[str]:
    if inspect.isclass(target):
        return [item.name for item in init_parameters(target)]
    return list(settings_of(target))


def init_parameters(cls: type) -> list[inspect.Parameter]:
    """Parameters of ``__init__`` without ``self``; none if the class has no ``__init__`` of its own."""
    return [] if cls.__init__ is object.__init__ else list(inspect.signature(cls).parameters.values())  # type: ignore[misc]


def methods(cls: type) -> list[Callable[..., Any]]:
    """Methods under ``@tool``, inherited ones too, as they stand in the file."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    members = (inspect.getattr_static(cls, name) for name in names)
    return [item for item in members if inspect.isfunction(item) and isinstance(vars(item).get(MARK), Mark)]
