"""What a call of the code tool costs, beside a bare interpreter that runs the same program.

    python benchmarks/code_tool.py [--calls 200] [--at-once 1 8 64] [--json FILE]

- ``bare``: ``subprocess.run([python, "-I", "-c", program])`` from threads: no limits, nothing killed, nothing bounded.
- ``plan NAME``: the same program through :func:`rltr_verl.sandbox.run_python`, under each plan that works here.

``CPU ms`` is the user and system time of all child processes a call; ``ratio`` is calls/s to those of ``bare``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rltr_verl.sandbox import PLANS, Limits, Plan, run_python

PROGRAM = "print(sum(range(1000)))"
ANSWER = "499500\n"
LIMITS = Limits(timeout_s=60.0, cpu_s=60.0)


def bare(threads: ThreadPoolExecutor) -> Callable[[], Awaitable[str]]:
    command = [sys.executable, "-I", "-c", PROGRAM]

    def run() -> str:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout

    async def call() -> str:
        return await asyncio.get_running_loop().run_in_executor(threads, run)

    return call


def under(plan: Plan) -> Callable[[], Awaitable[str]]:
    async def call() -> str:
        return (await run_python(PROGRAM, LIMITS, plan)).head

    return call


async def works(call: Callable[[], Awaitable[str]]) -> bool:
    try:
        return await call() == ANSWER
    except OSError:
        return False


async def measure(call: Callable[[], Awaitable[str]], calls: int, at_once: int) -> dict[str, float]:
    slots = asyncio.Semaphore(at_once)

    async def one() -> float:
        async with slots:
            start = time.perf_counter()
            assert await call() == ANSWER
            return time.perf_counter() - start

    cpu, start = _children_cpu(), time.perf_counter()
    waits = sorted(await asyncio.gather(*(one() for _ in range(calls))))
    seconds = time.perf_counter() - start
    figures = {"calls_per_s": calls / seconds, "median_ms": 1000 * waits[calls // 2]}
    return {**figures, "cpu_ms": 1000 * (_children_cpu() - cpu) / calls}


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def measure_all(calls: int, levels: list[int]) -> list[dict]:
    rows = []
    with ThreadPoolExecutor(max(levels)) as threads:
        contenders = {"bare": bare(threads)} | {f"plan {plan.name}": under(plan) for plan in PLANS}
        contenders = {name: call for name, call in contenders.items() if await works(call)}
        for at_once in levels:
            for name, call in contenders.items():
                figures = await measure(call, calls, at_once)
                first = rows[-1]["first"] if name != "bare" else figures["calls_per_s"]
                ratio = figures["calls_per_s"] / first
                rows.append({"contender": name, "at_once": at_once, **figures, "ratio": ratio, "first": first})
    return rows


def show(rows: list[dict]) -> None:
    table = Table("contender", "at once", "calls/s", "median ms", "CPU ms", "ratio")
    for row in rows:
        numbers = (f"{row[key]:.{digits}f}" for key, digits in (("calls_per_s", 1), ("median_ms", 0), ("cpu_ms", 1)))
        table.add_row(row["contender"], str(row["at_once"]), *numbers, f"{row['ratio']:.2f}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = asyncio.run(measure_all(args.calls, args.at_once))
    show(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
