"""Wall time and memory of ``rltr coldstart sample`` against a teacher of known latency, beside the ideal.

    python benchmarks/coldstart.py [--queries 1000] [-n 8] [--latency-ms 100] [--limit 64] [--stored 100000]
        [--only rltr aiohttp resume] [--json FILE]

The server is a process of its own on loopback that answers each request after ``--latency-ms``: first a call of a tool,
then the stop marker, so a trajectory is two requests and one tool call. The ideal is requests x latency / limit: a
client that costs nothing and keeps all slots busy. Contenders, in one run, each in a process of its own:

- ``rltr``: the public function, with the real teacher over HTTP: prompts rendered, turns parsed, the tool run, every
  sample appended to disk. Checking the queries and loading the tokenizer are not timed, they are ``start``.
- ``aiohttp``: the same number of requests with bodies made before and replies not read: what the transport alone costs.
- ``resume``: a run that finds ``--stored`` finished trajectories of three turns on disk and has nothing to do:
  seconds and peak memory of reading them.

Memory is the peak resident size of the process, the tokenizer and the package included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from rltr_verl.coldstart import run_file
from rltr_verl.coldstart.queries import read_queries
from rltr_verl.coldstart.records import Outcome, Sample, Task, Usage
from rltr_verl.coldstart.sampling import SampleOptions, sample
from rltr_verl.coldstart.store import Appender, Folder
from rltr_verl.coldstart.work import Work
from rltr_verl.config import RltrSettings
from rltr_verl.parsing import parse_turn
from rltr_verl.preflight import load_tokenizer
from rltr_verl.rollout.turns import Planner
from rltr_verl.trajectory import Observation, Trajectory

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' fakes; spawned processes get it too

from tests.coldstart.sampling_kit import STOP, Kit, call, towns, write_queries
from tests.fakes.planner_server import planner_server

_REQUESTS = 2
_OBSERVATION = "The station reports 21.4 degrees at noon, wind from the west, no rain expected before the evening. " * 6


@dataclass
class Run:
    """Seconds of the work and before it, CPU seconds, requests or trajectories, and peak memory in MiB."""

    seconds: float
    start: float
    cpu: float
    count: int
    peak_mib: float


def main() -> None:
    args = _arguments()
    contenders = {"rltr": _sampled, "aiohttp": _bare, "resume": _resumed}
    runs = {name: _apart(contender, args) for name, contender in contenders.items() if name in args.only}
    _report(args, runs)
    if args.json:
        args.json.write_text(json.dumps({name: asdict(run) for name, run in runs.items()}, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--latency-ms", type=float, default=100)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--stored", type=int, default=100_000)
    parser.add_argument("--only", nargs="+", default=["rltr", "aiohttp", "resume"], help="contenders to run")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _apart(contender: Callable[[argparse.Namespace, Path], Run], args: argparse.Namespace) -> Run:
    """Run one contender in a fresh process."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(contender, args, Path(folder)).result()


def _sampled(args: argparse.Namespace, folder: Path) -> Run:
    kit = Kit(folder)
    queries = write_queries(folder / "q.jsonl", *towns(args.queries))
    with planner_server(args.latency_ms) as url:
        return _timed(kit, kit.settings(url, concurrency=args.limit), queries, args.n)


def _timed(kit: Kit, settings: RltrSettings, queries: Path, n: int) -> Run:
    began, cpu = time.perf_counter(), time.process_time()
    summary = sample(kit.folder / "cs", queries, settings, str(kit.model), SampleOptions(n=n))
    assert summary.left == 0, summary
    start = time.perf_counter() - began - summary.seconds
    return Run(summary.seconds, start, time.process_time() - cpu, summary.made, _peak())


def _bare(args: argparse.Namespace, folder: Path) -> Run:
    """aiohttp and a semaphore."""
    messages = [{"role": "system", "content": "x" * 1400}, {"role": "user", "content": "How warm is town 1?"}]
    bodies = [
        json.dumps({"model": "m", "messages": messages, "max_tokens": 64, "seed": seed}).encode()
        for seed in range(args.queries * args.n * _REQUESTS)
    ]
    with planner_server(args.latency_ms) as url:
        began, cpu = time.perf_counter(), time.process_time()
        asyncio.run(_post_all(url, bodies, args.limit))
        return Run(time.perf_counter() - began, 0.0, time.process_time() - cpu, len(bodies) // _REQUESTS, _peak())


async def _post_all(url: str, bodies: list[bytes], limit: int) -> None:
    slots, headers = asyncio.Semaphore(limit), {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(body: bytes) -> None:
            async with slots, session.post(f"{url}/chat/completions", data=body, headers=headers) as reply:
                await reply.read()

        await asyncio.gather(*(one(body) for body in bodies))


def _resumed(args: argparse.Namespace, folder: Path) -> Run:
    """Reads ``--stored`` trajectories back; they are written by a process of its own, whose memory does not count."""
    kit = Kit(folder)
    each = 8
    queries = write_queries(folder / "q.jsonl", *towns(args.stored // each))
    writer = multiprocessing.get_context("spawn").Process(target=_store, args=(folder, queries, each), daemon=False)
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    size = Folder(folder / "cs").samples.stat().st_size
    began, cpu = time.perf_counter(), time.process_time()
    summary = sample(kit.folder / "cs", queries, kit.settings(), str(kit.model), SampleOptions(n=each))
    assert summary.made == 0 and summary.left == 0, summary
    Console(stderr=True).print(f"{summary.done:,} trajectories, {size / 2**20:,.0f} MiB on disk")
    return Run(time.perf_counter() - began, 0.0, time.process_time() - cpu, summary.done, _peak())


def _store(folder: Path, queries: Path, each: int) -> None:
    """What a run would have written."""
    kit, cs = Kit(folder), Folder(folder / "cs")
    settings, tokenizer = kit.settings(), load_tokenizer(str(kit.model), "--model")
    planner = Planner.build(settings, tokenizer)
    store, _ = read_queries(queries, planner)
    with Appender(cs.samples) as file:
        for task in Work(store, each, 1).left(set()):
            file.add(_played(task, tuple(planner.schemas.values())).to_dict())
    cs.run.write_text(json.dumps({"depends_on": run_file.depends_on(settings, tokenizer, planner.schemas, 1)}) + "\n")


def _played(task: Task, tools: tuple[dict[str, Any], ...]) -> Sample:
    """Two calls with observations of about 600 characters, then the stop marker."""
    turns = [parse_turn(call(f"{task.id} {number}")) for number in range(2)]
    seen = [Observation(_OBSERVATION, tool="search", seconds=0.1)]
    played = [type(turn)(**{**vars(turn), "observations": tuple(seen)}) for turn in turns]
    trajectory = Trajectory(task.info["query"], (*played, parse_turn(STOP)), tools)
    return Sample(task, Outcome.OK, trajectory, None, "m", Usage(600, 60, 0.0, 0.4))


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _report(args: argparse.Namespace, runs: dict[str, Run]) -> None:
    """Print the table."""
    trajectories = args.queries * args.n
    ideal = trajectories * _REQUESTS * args.latency_ms / 1000 / args.limit
    what = f"{args.queries} queries x {args.n} samples x {_REQUESTS} requests"
    table = Table(title=f"{what}, latency {args.latency_ms:g} ms, limit {args.limit}: ideal {ideal:.2f} s")
    for column in ("", "trajectories", "seconds", "x ideal", "start s", "CPU ms a trajectory", "peak MiB"):
        table.add_column(column, justify="right" if column else "left")
    for name, run in runs.items():
        ratio = "-" if name == "resume" else f"{run.seconds / ideal:.2f}"
        cost = f"{1000 * run.cpu / run.count:.2f}"
        cells = f"{run.count:,}", f"{run.seconds:.2f}", ratio, f"{run.start:.2f}", cost, f"{run.peak_mib:.0f}"
        table.add_row(name, *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
