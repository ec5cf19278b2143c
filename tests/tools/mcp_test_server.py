"""An MCP server of the tests, by the official package. Arguments: ``stdio``, or ``http PORT``."""

from __future__ import annotations

import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def refuse(why: str) -> str:
    """Fail."""
    raise ValueError(why)


@server.tool()
def variable(name: str) -> str:
    """Value of an environment variable."""
    return os.environ.get(name, "not set")


@server.tool()
def process() -> str:
    """Number of the server's process."""
    return str(os.getpid())


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def picture() -> list:
    """A text and an image."""
    return ["a picture", Image(data=b"\x89PNG" + b"\0" * 8, format="png")]


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    import anyio

    await anyio.sleep(seconds)
    return "waited"


if __name__ == "__main__":
    print("starting", file=sys.stderr)
    if sys.argv[1] == "stdio":
        server.run("stdio")
    elif sys.argv[1] == "http":
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    elif sys.argv[1] == "broken":
        sys.exit("the database is missing")
    else:
        time.sleep(60)
