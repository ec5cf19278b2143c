"""The tool `mcp` against a real MCP server: a process over stdio, and one over streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import mcp_types
import pytest

from rltr_verl.errors import ConfigError, ToolFailed
from rltr_verl.schemas import argument_problem
from rltr_verl.tool_guard import CallLimits
from rltr_verl.tool_parameters import check_parameters
from rltr_verl.tool_runner import ToolRunner
from rltr_verl.tooling import load_tools
from rltr_verl.toolkit.mcp_server import McpSettings, as_text
from rltr_verl.tools.mcp import provide_tools
from rltr_verl.trajectory import Status, ToolCall
from tests.fakes.ports import free_port

SERVER = str(Path(__file__).with_name("mcp_test_server.py"))
NAMES = ["add", "refuse", "variable", "process", "die", "picture", "wait"]


def stdio(**changes) -> McpSettings:
    settings = {"command": sys.executable, "args": [SERVER, "stdio"], "start_timeout_s": 300}
    return McpSettings(**{**settings, **changes})


def tools(**servers: McpSettings) -> dict:
    return {tool.name: tool for tool in provide_tools(servers=servers)}


def start_http(port: int) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def http_url():
    port = free_port()
    process = start_http(port)
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


@pytest.fixture(scope="module", params=["stdio", "http"])
def found(request):
    if request.param == "stdio":
        return tools(tests=stdio())
    return tools(tests=McpSettings(url=request.getfixturevalue("http_url"), start_timeout_s=300))


def test_every_tool_is_shown_with_the_servers_schema(found):
    assert list(found) == NAMES
    function = found["add"].schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a"] and found["add"].is_async
    assert argument_problem(found["add"].parameters, {"a": 1}) is None
    assert "is not of type 'integer'" in (argument_problem(found["add"].parameters, {"a": "x"}) or "")


async def test_calls_return_text(found):
    assert await found["add"].call(a=40, b=2) == "42"
    assert await found["picture"].call() == "a picture\n[image: image/png, 12 bytes]"


async def test_an_error_of_the_tool_is_tool_failed(found):
    with pytest.raises(ToolFailed, match="Error executing tool add"):
        await found["add"].call(a="x")


async def test_calls_at_once_share_one_server(found):
    results = await asyncio.gather(*(found["add"].call(a=n) for n in range(20)), found["process"].call())
    assert results[:20] == [str(n + 1) for n in range(20)]
    assert await found["process"].call() == results[20]


def test_calls_come_from_several_loops(found):
    first, second = [asyncio.run(found["process"].call()) for _ in range(2)]
    assert first == second


async def test_a_cancelled_call_leaves_the_server_as_it_is(found):
    before = await found["process"].call()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(found["wait"].call(seconds=30), 0.3)
    assert await found["process"].call() == before


async def test_the_runners_timeout_ends_a_call(found):
    runner = ToolRunner(found, timeout_s=60, limits={"wait": CallLimits(timeout_s=0.5)})
    (late,) = await runner.run([ToolCall("wait", {"seconds": 30}, "")])
    (next_one,) = await runner.run([ToolCall("add", {"a": 1}, "")])
    assert (late.status, next_one.status, next_one.text) == (Status.TIMEOUT, Status.OK, "2")


async def test_a_server_that_dies_is_started_again():
    found = tools(dying=stdio())
    first = await found["process"].call()
    with pytest.raises(ConnectionError, match="'dying' is gone"):
        await found["die"].call()
    assert await found["process"].call() != first


async def test_a_server_killed_between_calls_is_started_again():
    found = tools(killed=stdio())
    first = await found["process"].call()
    os.kill(int(first), signal.SIGKILL)
    with pytest.raises(ConnectionError):
        await found["process"].call()
    assert await found["process"].call() not in ("", first)


async def test_an_http_server_that_was_restarted_is_found_again():
    port = free_port()
    process = start_http(port)
    try:
        found = tools(again=McpSettings(url=f"http://127.0.0.1:{port}/mcp", start_timeout_s=300))
        assert await found["add"].call(a=1) == "2"
        process.kill()
        process.wait()
        with pytest.raises(ConnectionError):
            await found["add"].call(a=1)
        process = start_http(port)
        assert await found["add"].call(a=1) == "2"
    finally:
        process.kill()
        process.wait()


def test_the_same_server_is_opened_once_per_process():
    again = [tools(once=stdio())["process"] for _ in range(2)]
    first, second = [asyncio.run(tool.call()) for tool in again]
    assert first == second


async def test_a_server_sees_only_the_variables_it_is_given(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    monkeypatch.setenv("SERVER_KEY", "for the server")
    found = tools(tests=stdio(env={"PLACE": "Arlen"}, env_from=["SERVER_KEY"]))
    shown = [await found["variable"].call(name=name) for name in ("JUDGE_KEY", "SERVER_KEY", "PLACE")]
    assert shown == ["not set", "for the server", "Arlen"]


def test_names_are_chosen_and_prefixed(http_url):
    both = tools(
        one=stdio(tools=["add", "process"]), two=McpSettings(url=http_url, prefix="far_", tools=["process", "add"])
    )
    assert list(both) == ["add", "process", "far_process", "far_add"]
    assert asyncio.run(both["far_add"].call(a=2)) == "3"
    assert asyncio.run(both["process"].call()) != asyncio.run(both["far_process"].call())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"args": [SERVER, "broken"]}, "'s' does not work .*the database is missing"),
        ({"args": [SERVER, "silent"], "start_timeout_s": 2}, "'s' does not work .no answer within 2 s"),
        ({"command": "/no/such/program"}, "'s' does not work .*No such file"),
        ({"command": None, "url": "http://127.0.0.1:9/mcp"}, "'s' does not work"),
        ({"env_from": ["NO_SUCH_VARIABLE"]}, "NO_SUCH_VARIABLE is not set"),
        ({"tools": ["add", "sub"]}, "'s' has no tool 'sub'. Fix: its tools: add, refuse"),
    ],
)
def test_a_server_that_does_not_work_is_told_at_start(settings, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        tools(s=stdio(**settings))


async def test_a_server_of_an_older_protocol_that_also_writes_to_stdout():
    """Written by hand: the handshake that most servers speak, pages of tools, a line of log between the messages."""
    found = tools(old=McpSettings(command=sys.executable, args=[str(Path(SERVER).with_name("mcp_old_server.py"))]))
    assert list(found) == ["echo", "bare"]
    assert found["bare"].schema["function"] == {
        "name": "bare",
        "description": "bare",
        "parameters": {"type": "object", "properties": {}},
    }
    assert await found["echo"].call(text="河流") == "河流"
    with pytest.raises(ToolFailed, match="no such tool"):
        await found["bare"].call()


async def test_a_recipe_lists_the_servers():
    loaded = load_tools(["mcp"], {"mcp": {"servers": {"tests": stdio().model_dump()}}})
    assert list(loaded) == NAMES
    runner, statuses = ToolRunner(loaded), []
    for name, arguments in (("add", {"a": 1}), ("add", {"a": "x"}), ("refuse", {"why": "no"}), ("die", {})):
        statuses += [seen.status for seen in await runner.run([ToolCall(name, arguments, "")])]
    assert statuses == [Status.OK, Status.BAD_ARGUMENTS, Status.TOOL_FAILED, Status.INFRASTRUCTURE]
    with pytest.raises(ConfigError, match="rltr.tool_settings.mcp.servers.x: .*'x' does not work"):
        load_tools(["mcp"], {"mcp": {"servers": {"x": {"command": "/no/such/program"}}}})
    with pytest.raises(ConfigError, match="rltr.tool_settings.mcp: setting 'servers' is missing"):
        load_tools(["mcp"])


ODD_LIST = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    version = asked.get("params", {}).get("protocolVersion")
    info = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "odd", "version": "1"}}
    results = {"initialize": {"result": info}, "tools/list": {"result": {"tools": "none"}}}
    answer = results.get(asked["method"], {"error": {"code": -32601, "message": "no such method"}})
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


COUNTER = """
import json, sys
calls = 0
for line in sys.stdin:
    asked = json.loads(line)
    version = asked.get("params", {}).get("protocolVersion")
    info = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "c", "version": "1"}}
    schema = {"type": "object", "properties": {"code": {"type": "integer"}}}
    answer = {"error": {"code": -32601, "message": "no such method"}}
    if asked["method"] == "initialize":
        answer = {"result": info}
    elif asked["method"] == "tools/list":
        answer = {"result": {"tools": [{"name": "count", "inputSchema": schema}]}}
    elif asked["method"] == "tools/call":
        calls += 1
        code = asked["params"]["arguments"].get("code")
        answer = {"result": {"content": [{"type": "text", "text": str(calls)}]}}
        if code is not None:
            answer = {"error": {"code": code, "message": "no such thing"}}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""


@pytest.mark.parametrize("code", [-32600, -32000, -32602])
async def test_no_error_of_a_call_takes_the_server_and_its_state_from_the_others(code):
    settings = McpSettings(command=sys.executable, args=["-c", COUNTER], prefix=f"{-code}_", start_timeout_s=300)
    (count,) = tools(counter=settings).values()
    assert await count.call() == "1"
    with pytest.raises(ToolFailed, match="no such thing"):
        await count.call(code=code)
    assert await count.call() == "3"


def test_a_server_whose_list_is_none_is_told_at_start():
    with pytest.raises(ConfigError, match="servers.odd: the MCP server 'odd' does not work .1 validation error"):
        tools(odd=McpSettings(command=sys.executable, args=["-c", ODD_LIST]))


def test_two_tools_of_one_name_are_refused(http_url):
    with pytest.raises(ConfigError, match="two tools are called 'add'.*servers.two.prefix=two_"):
        tools(one=stdio(), two=McpSettings(url=http_url))


@pytest.mark.parametrize("settings", [{}, {"command": "x", "url": "http://x"}, {"command": "x", "colour": 1}])
def test_settings_are_strict(settings):
    with pytest.raises(ValueError):
        McpSettings(**settings)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "properties": {"a": {"type": "numbr"}}}, "broken schema"),
        ({"type": "array"}, "not of an object"),
        ({"type": "object", "properties": {"a": {"$ref": "http://example.org/a.json"}}}, "refers to http://example"),
        ({"type": "object", "properties": {"a": {"$ref": "#/definitions/Gone"}}}, "refers to #/definitions/Gone"),
        ({"type": "object", "properties": {"a": {"pattern": "\\p{L}"}}}, "broken schema"),
        ({"type": "object", "properties": None}, "broken schema"),
        ([], "not of an object|broken schema"),
    ],
)
def test_what_is_no_schema_of_arguments_is_refused(schema, message):
    with pytest.raises(ConfigError, match=message):
        check_parameters(schema, "tool 'x'")


def test_kinds_of_content():
    blob = mcp_types.BlobResourceContents(uri="file:///a.bin", blob="AAECAw==", mime_type="application/x")
    text = mcp_types.TextResourceContents(uri="file:///a.txt", text="inside")
    parts = [
        mcp_types.TextContent(text="one"),
        mcp_types.EmbeddedResource(resource=text),
        mcp_types.EmbeddedResource(resource=blob),
        mcp_types.ResourceLink(name="a", uri="file:///a.txt"),
        mcp_types.AudioContent(data="AAAA", mime_type="audio/wav"),
    ]
    lines = as_text(mcp_types.CallToolResult(content=parts)).split("\n")
    assert lines == [
        "one",
        "[file:///a.txt]",
        "inside",
        "[file:///a.bin: application/x, 4 bytes]",
        "[a: file:///a.txt]",
        "[audio: audio/wav, 3 bytes]",
    ]
    structured = mcp_types.CallToolResult(content=[], structured_content={"km": 41})
    assert as_text(structured) == '{"km": 41}'
