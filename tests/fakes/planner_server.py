"""A chat server that plays a planner: a call that no other sample makes, then the stop marker. Real HTTP, no model.

As a process: ``python -m tests.fakes.planner_server --port-file F --latency-ms 100``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.openai_server import FakeServer

ROOT = Path(__file__).parents[2]
STOP = "<answer>"


def turn(_: int, payload: dict[str, Any]) -> str:
    """The next turn of a conversation."""
    last = payload["messages"][-1]
    if last["role"] == "tool":
        return STOP
    arguments = {"query": f"{last['content'][:40]} {payload['seed']}"}
    return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': arguments})}\n</tool_call>"


@contextmanager
def planner_server(latency_ms: float = 0.0) -> Iterator[str]:
    """The URL of a server in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, "-m", "tests.fakes.planner_server", "--port-file", str(port_file)]
        process = subprocess.Popen([*command, "--latency-ms", str(latency_ms)], cwd=ROOT)
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    raise RuntimeError("the server did not start")
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port_file.read_text()}/v1"
        finally:
            process.terminate()
            process.wait()


async def _serve(port_file: Path, latency_s: float) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with FakeServer(turn, latency_s=latency_s, keep_requests=False) as server:
        part = port_file.with_suffix(".part")
        part.write_text(str(server.port))
        part.rename(port_file)
        await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    args = parser.parse_args()
    asyncio.run(_serve(args.port_file, args.latency_ms / 1000))
