"""A connection to an MCP server, kept open for all calls of a process and opened anew when it is gone.

The connection lives in the background loop (:mod:`rltr_verl.toolkit.background`), so that calls may come from any loop.
A call ends in :class:`ToolFailed` where the server answers with an error, and in ``ConnectionError``, a fault of the
surroundings, where it is gone; the next call starts it again. A call has no time limit of its own: who waits cancels
it, and the server is told.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, TextIO

import anyio
import httpx2
import mcp_types as types
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import Field, ValidationError, model_validator

from rltr_verl.config import Settings
from rltr_verl.errors import ConfigError, ToolFailed
from rltr_verl.toolkit.background import background

_GONE = (anyio.ClosedResourceError, anyio.BrokenResourceError, httpx2.TransportError, OSError)
_GONE_CODES = (types.CONNECTION_CLOSED, types.INVALID_REQUEST)
"""Codes of a connection that ended: closed, or a session that a restarted server does not know. A server that is well
may give them to a call too."""
_STDERR_CHARS = 1000


class McpSettings(Settings):
    """How one server is reached and which of its tools are shown."""

    command: str | None = Field(None, description="Program to start; it talks over stdin and stdout.")
    args: list[str] = Field(default_factory=list, description="Its arguments.")
    env: dict[str, str] = Field(default_factory=dict, description="Variables it gets besides PATH, HOME and the like.")
    env_from: list[str] = Field(default_factory=list, description="Variables of this process that it gets, for keys.")
    cwd: str | None = Field(None, description="Folder it starts in.")
    url: str | None = Field(None, description="In place of a command: address of a streamable HTTP server.")
    key_env: str | None = Field(None, description="url: environment variable with the bearer token.")
    prefix: str = Field("", description="Put before the name of each tool.")
    tools: list[str] | None = Field(None, description="Tools to show, by the server's names; null: all.")
    start_timeout_s: float = Field(30.0, gt=0, description="Wall seconds of connecting and listing the tools.")

    @model_validator(mode="after")
    def _reachable(self) -> McpSettings:
        if (self.command is None) == (self.url is None):
            raise ValueError("a server needs either command or url")
        return self


class McpServer:
    """One server.

    Args:
        name: for messages.
    """

    def __init__(self, name: str, settings: McpSettings) -> None:
        self.name, self.settings = name, settings
        self._lock = asyncio.Lock()
        self._owner: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._closing = asyncio.Event()
        self._said = ""
        background().at_close(self.close)

    def tools(self) -> list[types.Tool]:
        """The server's tools, asked for now. Blocks. Raises :class:`ConfigError` if the server does not work."""
        return background().wait(self._listed())

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Text of what ``tool`` returns; from any loop."""
        return await background().until(self._call(tool, arguments))

    async def close(self) -> None:
        """End the connection and a server that was started. Only in the background loop."""
        owner, self._owner, self._client = self._owner, None, None
        self._closing.set()
        if owner is not None:
            await asyncio.wait([owner])

    async def _listed(self) -> list[types.Tool]:
        try:
            return await asyncio.wait_for(self._list(), self.settings.start_timeout_s)
        except asyncio.TimeoutError:
            problem = f"no answer within {self.settings.start_timeout_s:g} s"
        except (MCPError, ValidationError, *_GONE) as error:
            problem = _reason(error).splitlines()[0]
        await self.close()
        said = f"; it wrote: {self._said.strip()}" if self._said.strip() else ""
        fix = "start it by hand with the same command, or check url and key_env."
        raise ConfigError(f"the MCP server '{self.name}' does not work ({problem}{said})", fix=fix)

    async def _list(self) -> list[types.Tool]:
        client = await self._connected()
        found, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        client = None
        try:
            client = await asyncio.wait_for(self._connected(), self.settings.start_timeout_s)
            result = await client.call_tool(tool, dict(arguments))
        except MCPError as error:
            if error.code not in _GONE_CODES or await self._stands(client):
                raise ToolFailed(str(error)) from None
            raise await self._lost(client, error) from None
        except _GONE as error:
            raise await self._lost(client, error) from None
        text = as_text(result)
        if result.is_error:
            raise ToolFailed(text or "the tool failed without a message")
        return text

    async def _stands(self, client: Client | None) -> bool:
        """Whether the server still answers on this connection: other trajectories may have state behind it."""
        if client is None:
            return False
        try:
            await asyncio.wait_for(client.list_tools(), self.settings.start_timeout_s)
        except MCPError as error:
            return error.code not in _GONE_CODES
        except _GONE:
            return False
        except (asyncio.TimeoutError, ValidationError):  # busy, or an answer that is none: not a connection that ended
            return True
        return True

    async def _lost(self, client: Client | None, error: Exception) -> ConnectionError:
        """Give the connection up, unless another call has replaced it already."""
        if client is self._client:
            await self.close()
        return ConnectionError(f"the MCP server '{self.name}' is gone ({_reason(error)})")

    async def _connected(self) -> Client:
        async with self._lock:
            if self._client is None:
                self._closing, self._said = asyncio.Event(), ""
                ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
                self._owner = asyncio.create_task(self._own(ready, self._closing))
                try:
                    self._client = await ready
                except BaseException:
                    self._owner.cancel()
                    raise
            return self._client

    async def _own(self, ready: asyncio.Future[Client], closing: asyncio.Event) -> None:
        """Hold the connection: what opens it must also close it, in the same task."""
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(Client(await self._transport(stack)))
                ready.set_result(client)
                await closing.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(_first(error))

    async def _transport(self, stack: AsyncExitStack) -> Any:
        settings = self.settings
        if settings.command is not None:
            env = {**settings.env, **{name: _variable(name) for name in settings.env_from}}
            server = StdioServerParameters(command=settings.command, args=settings.args, env=env, cwd=settings.cwd)
            return stdio_client(server, errlog=await self._stderr(stack))
        headers = {"Authorization": f"Bearer {_variable(settings.key_env)}"} if settings.key_env else {}
        http = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(settings.start_timeout_s, read=None))
        return streamable_http_client(str(settings.url), http_client=await stack.enter_async_context(http))

    async def _stderr(self, stack: AsyncExitStack) -> TextIO:
        """A file for the server's stderr, of which only the end is kept."""
        read, write = os.pipe()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(read, "rb"))
        stack.callback(pipe.close)
        keeping = asyncio.create_task(self._keep(reader))
        stack.callback(keeping.cancel)
        return stack.enter_context(os.fdopen(write, "w"))

    async def _keep(self, reader: asyncio.StreamReader) -> None:
        while block := await reader.read(4096):
            self._said = (self._said + block.decode("utf-8", "replace"))[-_STDERR_CHARS:]


def as_text(result: types.CallToolResult) -> str:
    """What a tool returned as text: texts in full, the rest by kind and size; without parts the JSON value."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_part(part) for part in result.content)


def _part(part: types.ContentBlock) -> str:
    if isinstance(part, types.TextContent):
        return part.text
    if isinstance(part, types.ResourceLink):
        return f"[{part.title or part.name}: {part.uri}]"
    if isinstance(part, types.EmbeddedResource):
        inner = part.resource
        if isinstance(inner, types.TextResourceContents):
            return f"[{inner.uri}]\n{inner.text}"
        return f"[{inner.uri}: {inner.mime_type or 'data'}, {_size(inner.blob)} bytes]"
    return f"[{part.type}: {part.mime_type}, {_size(part.data)} bytes]"


def _size(base64_text: str) -> int:
    return len(base64_text.rstrip("=")) * 3 // 4


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"the variable {name} is not set", fix=f"export {name}=...")
    return value


def _first(error: BaseException) -> BaseException:
    """The first error of a group of them, or the error itself."""
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    return error


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
