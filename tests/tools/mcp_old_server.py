"""An MCP server of the tests as the protocol was in 2024: messages by hand, and a log line on stdout before each."""

from __future__ import annotations

import json
import sys

ECHO = {"name": "echo", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}
BARE = {"name": "bare", "inputSchema": {"type": "object"}}


def answer(method: str, params: dict) -> dict:
    """Result or error of a request."""
    if method == "initialize":
        server = {"name": "old", "version": "1"}
        return {"result": {"protocolVersion": "2024-11-05", "capabilities": {"tools": {}}, "serverInfo": server}}
    if method == "tools/list":
        last = params.get("cursor") == "2"
        return {"result": {"tools": [BARE]} if last else {"tools": [ECHO], "nextCursor": "2"}}
    if method == "tools/call" and params["name"] == "echo":
        return {"result": {"content": [{"type": "text", "text": params["arguments"]["text"]}]}}
    if method == "tools/call":
        return {"error": {"code": -32602, "message": "no such tool"}}
    return {"error": {"code": -32601, "message": "Method not found"}}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        print(f"log: {message['method']}", flush=True)
        reply = {"jsonrpc": "2.0", "id": message["id"], **answer(message["method"], message.get("params") or {})}
        print(json.dumps(reply), flush=True)
