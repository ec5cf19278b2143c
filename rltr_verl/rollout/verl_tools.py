"""verl's own tools as ours: ``BaseTool`` entries of a YAML file, and functions under ``@function_tool``.

They run under our limits and statuses, with these differences to verl's stock ``tool_agent``: an instance lives as long
as its trajectory (stock: one call), ``execute`` gets ``agent_data=None``, only the text of a response is used, and a
tool's own reward and metrics are dropped. A failure is typed by what is raised: any exception is ``infrastructure``
unless the tool raises our :class:`BadArguments` or :class:`ToolFailed`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, FunctionTool, normalize_function_tool_return
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.tools.tool_registry import initialize_tools_from_config

from rltr_verl.errors import ConfigError
from rltr_verl.tool_schema import place
from rltr_verl.tooling import State, Tool


def yaml_tools(path: str) -> list[Tool]:
    """The tools of a file as ``actor_rollout_ref.rollout.multi_turn.tool_config_path`` takes it.

    A row's ``extra_info.tools_kwargs.<tool>.create_kwargs`` goes to ``create``, as with verl.

    Raises ConfigError when the file is not there or verl cannot make its tools.
    """
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"no file '{path}'", where="rltr.tools", fix=f"check the path; it was looked up as {file}.")
    try:
        made = initialize_tools_from_config(str(file))
    except Exception as error:  # a user's class may raise anything; it is told, never swallowed
        problem = f"verl cannot make its tools ({type(error).__name__}: {error})"
        fix = "see verl's documentation of tool_config_path; the class must be importable."
        raise ConfigError(problem, where=path, fix=fix) from error
    return [_base_tool(item, str(file)) for item in made]


def function_tools(module: str) -> list[Tool]:
    """Functions of ``module`` under verl's ``@function_tool``, in the order of the file."""
    return [_function_tool(item) for item in FUNCTION_TOOL_REGISTRY.values() if item.fn.__module__ == module]


def _schema(schema: OpenAIFunctionToolSchema) -> dict[str, Any]:
    return schema.model_dump(exclude_unset=True, exclude_none=True)


def _function_tool(item: FunctionTool) -> Tool:
    call = functools.partial(_call_async if item.is_async else _call, item.fn)
    schema = _schema(item.tool_schema)
    if not any(one.kind is one.VAR_KEYWORD for one in inspect.signature(item.fn).parameters.values()):
        schema["function"]["parameters"]["additionalProperties"] = False  # else a wrong name would be a crash
    return Tool(item.name, schema, call, item.is_async, where=place(item.fn))


def _call(function: Any, /, **arguments: Any) -> str:
    return _text(function(**arguments))


async def _call_async(function: Any, /, **arguments: Any) -> str:
    return _text(await function(**arguments))


def _text(result: Any) -> str:
    response, _, _ = normalize_function_tool_return(result)
    return response.text or ""


class _Instance:
    """An instance of a ``BaseTool``, known to it by an id."""

    def __init__(self, tool: BaseTool) -> None:
        self.tool = tool
        self.id: str | None = None

    async def create(self, row: Mapping[str, Any]) -> None:
        of_tool = (row.get("tools_kwargs") or {}).get(self.tool.name) or {}
        self.id, _ = await self.tool.create(create_kwargs=of_tool.get("create_kwargs") or {})

    async def execute(self, /, **arguments: Any) -> str:
        response, _, _ = await self.tool.execute(self.id, arguments, agent_data=None)
        return response.text or ""

    async def release(self) -> None:
        if self.id is not None:
            await self.tool.release(self.id)


def _base_tool(item: BaseTool, where: str) -> Tool:
    state = State(item.name, functools.partial(_Instance, item), _Instance.create, _Instance.release)
    return Tool(item.name, _schema(item.tool_schema), _Instance.execute, is_async=True, state=state, where=where)
