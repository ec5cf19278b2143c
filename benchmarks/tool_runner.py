"""Wall time of tool calls of many trajectories at once, beside the ideal and verl's stock tool loop.

    python benchmarks/tool_runner.py [--trajectories 512] [--calls 3] [--call-s 0.2] [--timeout-s 2] [--json FILE]

Each trajectory makes its calls one after the other; the tool sleeps ``--call-s``. The ideal is calls x call-s: a runner
that costs nothing and makes nobody wait. Without hung calls the median of ``--repeats`` runs is shown. Contenders:

- ``async``, ``sync``: :class:`rltr_verl.tool_runner.ToolRunner` with an ``async def`` tool and with a plain one.
- ``..., 1 % hung``: one call in a hundred hangs for ``--hang-s``; the ideal is the time without + ``--timeout-s``.
- ``verl async``, ``verl sync``: ``_call_tool`` of verl's ``tool_agent`` with the same functions as function tools.
- ``verl async, 1 % hung``: it has no timeout, so a step waits ``--hang-s`` at least.

verl runs plain functions in asyncio's own threads, of which there are the number of cores + 4: ``verl sync`` asks a
fraction of the trajectories (``--verl-sync``) and its time is scaled up to all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from rltr_verl import ToolCall, tool
from rltr_verl.tool_guard import CallLimits
from rltr_verl.tool_runner import ToolRunner
from rltr_verl.tooling import Tool, describe

CALL_S = HANG_S = 0.0


@tool
async def async_wait(text: str) -> str:
    """Wait.

    Args:
        text: comes back; "hang" waits longer.
    """
    await asyncio.sleep(HANG_S if text == "hang" else CALL_S)
    return text


@tool
def sync_wait(text: str) -> str:
    """Wait.

    Args:
        text: comes back; "hang" waits longer.
    """
    time.sleep(HANG_S if text == "hang" else CALL_S)
    return text


@dataclass
class Run:
    """Wall and CPU seconds of one contender, what it is held against, and how its calls ended."""

    seconds: float
    cpu: float
    ideal: float
    statuses: dict[str, int]

    @property
    def ratio(self) -> float:
        return self.seconds / self.ideal


Call = Callable[[str], Awaitable[str]]
"""Make one call with this text; gives its status."""


def main() -> None:
    args = _arguments()
    global CALL_S, HANG_S
    CALL_S, HANG_S = args.call_s, args.hang_s
    runs = {name: median(args, *contender) for name, contender in _contenders(args).items()}
    for kind in ("async", "sync"):
        runs[f"{kind}, 1 % hung"].ideal = runs[kind].seconds + args.timeout_s
    report(args, runs)
    if args.json:
        args.json.write_text(json.dumps({name: {**asdict(run), "ratio": run.ratio} for name, run in runs.items()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--call-s", type=float, default=0.2)
    parser.add_argument("--timeout-s", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5, help="runs of a contender without hung calls")
    parser.add_argument("--hang-s", type=float, default=60.0)
    parser.add_argument("--verl-sync", type=int, default=32, help="trajectories of `verl sync`")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _contenders(args: argparse.Namespace) -> dict[str, tuple[Call, int, bool]]:
    """Name -> how a call is made, trajectories, whether some calls hang."""
    many = args.trajectories
    return {
        "async": (ours(args, async_wait, True), many, False),
        "sync": (ours(args, sync_wait, False), many, False),
        "async, 1 % hung": (ours(args, async_wait, True), many, True),
        "sync, 1 % hung": (ours(args, sync_wait, False), many, True),
        "verl async": (verls(async_wait), many, False),
        "verl sync": (verls(sync_wait), args.verl_sync, False),
        "verl async, 1 % hung": (verls(async_wait), many, True),
    }


def ours(args: argparse.Namespace, function: Callable[..., Any], is_async: bool) -> Call:
    name = function.__name__
    limits = CallLimits(timeout_s=args.timeout_s, concurrency=args.trajectories)
    runner = ToolRunner({name: Tool(name, describe(function), function, is_async)}, limits={name: limits})

    async def call(text: str) -> str:
        (observation,) = await runner.run([ToolCall(name, {"text": text}, "raw")])
        return observation.status.value

    return call


def verls(function: Callable[..., Any]) -> Call:
    """verl's stock execution of one call, without its prompts and tokens."""
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.experimental.agent_loop.tool_parser import FunctionCall
    from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, function_tool

    name = function.__name__
    function_tool(name)(function)
    loop = SimpleNamespace(tools={name: FUNCTION_TOOL_REGISTRY[name]}, max_tool_response_length=256)

    async def call(text: str) -> str:
        made = FunctionCall(name=name, arguments=json.dumps({"text": text}))
        response, _, _ = await ToolAgentLoop._call_tool(loop, made, {}, SimpleNamespace())
        return "ok" if response.text == text else "error"

    return call


def median(args: argparse.Namespace, call: Call, trajectories: int, hangs: bool) -> Run:
    """The run of median time out of ``--repeats``; one run where calls hang."""
    runs = [asyncio.run(measure(args, call, trajectories, hangs)) for _ in range(1 if hangs else args.repeats)]
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


async def measure(args: argparse.Namespace, call: Call, trajectories: int, hangs: bool) -> Run:
    """Let all trajectories make their calls."""
    statuses: Counter[str] = Counter()

    async def trajectory(number: int) -> None:
        for index in range(args.calls):
            text = "hang" if hangs and (number * args.calls + index) % 100 == 50 else f"{number}.{index}"
            statuses[await call(text)] += 1

    start, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(trajectory(number) for number in range(trajectories)))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    scale = args.trajectories / trajectories
    return Run(seconds * scale, cpu * scale, args.calls * args.call_s, dict(statuses))


def report(args: argparse.Namespace, runs: dict[str, Run]) -> None:
    title = f"{args.trajectories} trajectories x {args.calls} calls x {args.call_s * 1000:g} ms"
    table = Table(
        "contender", "s", "ideal s", "ratio", "CPU s", "statuses", title=f"{title}, timeout {args.timeout_s:g} s"
    )
    for name, run in runs.items():
        statuses = ", ".join(f"{status} {count}" for status, count in sorted(run.statuses.items()))
        cells = (f"{run.seconds:.3f}", f"{run.ideal:.3f}", f"{run.ratio:.2f}", f"{run.cpu:.2f}")
        table.add_row(name, *cells, statuses)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
