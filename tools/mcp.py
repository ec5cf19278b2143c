"""Every tool of MCP servers, over stdio or streamable HTTP, by the official client (``pip install 'rltr_verl[mcp]'``).

What a server's tool does, and what it may reach, is the server's matter: nothing is sandboxed here. Resources, prompts,
sampling and elicitation are not offered to the model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from rltr_verl.errors import ConfigError
from rltr_verl.tool_parameters import check_parameters
from rltr_verl.tooling import Tool

try:
    from rltr_verl.toolkit.mcp_server import McpServer, McpSettings
except ModuleNotFoundError as error:
    fix = "pip install 'rltr_verl[mcp]'"
    raise ConfigError(f"the tool mcp needs {error.name}", where="rltr.tools", fix=fix) from None

_WHERE = "rltr.tool_settings.mcp.servers"
_SERVERS: dict[str, McpServer] = {}


def provide_tools(*, servers: Mapping[str, McpSettings]) -> list[Tool]:
    """The tools of all servers, in the order of the servers and of their own lists.

    Args:
        servers: ``{name: settings}``; the name stands in messages only.

    Raises:
        ConfigError: a server does not start or answer, a tool that was asked for is not there, two tools have one name,
            or a schema is none.
    """
    tools: dict[str, Tool] = {}
    for name, settings in servers.items():
        where = f"{_WHERE}.{name}"
        try:
            found = _of_server(name, settings)
        except ConfigError as error:
            raise ConfigError(error.problem, where=where, fix=error.fix) from None
        for tool in found:
            if tool.name in tools:
                fix = f"give the server a prefix: {where}.prefix={name}_"
                raise ConfigError(f"two tools are called '{tool.name}'", where=where, fix=fix)
            tools[tool.name] = tool
    return list(tools.values())


def _of_server(name: str, settings: McpSettings) -> list[Tool]:
    server = _opened(name, settings)
    listed = {tool.name: tool for tool in server.tools()}
    wanted = list(listed) if settings.tools is None else settings.tools
    missing = [tool for tool in wanted if tool not in listed]
    if missing:
        problem = f"the MCP server '{name}' has no tool '{missing[0]}'"
        raise ConfigError(problem, fix=f"its tools: {', '.join(listed) or 'none'}.")
    return [_tool(server, listed[tool]) for tool in wanted]


def _opened(name: str, settings: McpSettings) -> McpServer:
    """One connection a process for the same server, however often the tools are loaded."""
    key = f"{name} {settings.model_dump_json()}"
    if key not in _SERVERS:
        _SERVERS[key] = McpServer(name, settings)
    return _SERVERS[key]


def _tool(server: McpServer, described: Any) -> Tool:
    name = server.settings.prefix + described.name
    parameters = {"type": "object", "properties": {}, **described.input_schema}
    check_parameters(
        parameters,
        f"tool '{described.name}' of the MCP server '{server.name}'",
        fix="correct the server, or leave the tool out (tools).",
    )
    text = described.description or described.title or described.name
    function = {"name": name, "description": text.strip(), "parameters": parameters}
    call = functools.partial(_call, server, described.name)
    where = f"MCP server '{server.name}'"
    return Tool(name=name, schema={"type": "function", "function": function}, call=call, is_async=True, where=where)


async def _call(server: McpServer, tool: str, /, **arguments: Any) -> str:
    return await server.call(tool, arguments)
