"""Wall time of N votes a trajectory against a judge server of known latency, beside the ideal and other clients.

    python benchmarks/judge.py [--trajectories 2000] [--votes 3] [--latency-ms 50] [--limit 64] [--json FILE]

The server is a process of its own on loopback that answers each request after ``--latency-ms``. The ideal is
trajectories x votes x latency / limit: a client that costs nothing and keeps all slots busy. Contenders, in one run:

- ``rltr``: the endpoint checker as training uses it: prompt rendered, verdict parsed, every vote written to a cache on
  disk, the limit held over all processes of the node.
- ``aiohttp``: the bare requests, bodies made before, replies not read: what the transport alone costs.
- ``openai SDK``: the official asynchronous client, bodies made before.
- ``verl rate_limited``: verl's own manager with ``max_concurrent`` = limit and a reward function that posts by aiohttp.
  It asks once a trajectory, so it is called votes x trajectories times.
- ``sequential``: one request after another, ``--sequential`` of them, scaled up to all.

``rltr, 1 % hung`` asks a server that never answers every hundredth request; its ratio is to ``rltr``. The longest wait
of a trajectory must stay under its deadline (``--deadline-s``, or twice the ideal if that is longer). The last columns
are the longest time that the event loop was blocked, garbage collections aside, and the longest of these.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.table import Table

from rltr_verl.config import CacheSettings, JudgeSettings
from rltr_verl.judge import build_checker
from rltr_verl.judge.prompting import judge_messages, load_prompt
from rltr_verl.trajectory import Trajectory

ROOT = Path(__file__).parents[1]
OBSERVATION = "The station reports 21.4 degrees at noon, wind from the west, no rain expected before the evening. " * 6
REPLY_FORMAT = {"type": "json_object"}


@dataclass
class Run:
    """Figures of one contender: seconds of wall and CPU time, requests; longest trajectory, stall, collection."""

    seconds: float
    cpu: float
    requests: int
    longest: float = 0.0
    stall_ms: float = 0.0
    collection_ms: float = 0.0


def main() -> None:
    args = _arguments()
    work = [_trajectory(number) for number in range(args.trajectories)]
    runs = {
        "rltr": measure(args, lambda url: ours(args, url, work)),
        "rltr, 1 % hung": measure(args, lambda url: ours(args, url, work), "--hang-every", "100"),
        "aiohttp": measure(args, lambda url: bare(args, url, _bodies(args, work))),
        "openai SDK": measure(args, lambda url: sdk(args, url, _bodies(args, work))),
        "verl rate_limited": measure(args, lambda url: rate_limited(args, url, _bodies(args, work))),
        "sequential": measure(args, lambda url: bare(args, url, _bodies(args, work)[: args.sequential], limit=1)),
    }
    report(args, runs)
    if args.json:
        args.json.write_text(json.dumps({name: asdict(run) for name, run in runs.items()}, indent=2))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=2000)
    parser.add_argument("--votes", type=int, default=3)
    parser.add_argument("--latency-ms", type=float, default=50)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--deadline-s", type=float, default=10, help="of a trajectory")
    parser.add_argument("--sequential", type=int, default=60, help="requests of the sequential client")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _trajectory(number: int) -> Trajectory:
    """Two calls with observations of about 600 characters."""
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "weather %d %d"}}\n</tool_call>'
    messages = []
    for turn in range(2):
        messages += [
            {"role": "assistant", "content": call % (number, turn)},
            {"role": "tool", "content": f"{number}.{turn}: {OBSERVATION}"},
        ]
    return Trajectory.from_messages([*messages, {"role": "assistant", "content": "<answer>"}], f"Is {number} warmer?")


def _bodies(args: argparse.Namespace, work: list[Trajectory]) -> list[bytes]:
    prompt = load_prompt("completeness", "en")
    bodies = []
    for trajectory in work:
        messages = judge_messages(trajectory, prompt, 16_000)
        for seed in range(args.votes):
            bodies.append(json.dumps({"model": "judge", "messages": messages, "max_tokens": 64, "seed": seed}).encode())
    return bodies


def measure(args: argparse.Namespace, contender: Callable[[str], Awaitable[Run]], *server: str) -> Run:
    """Run one contender against a fresh server."""
    with _server(args, *server) as url:
        return asyncio.run(contender(url))


@contextmanager
def _server(args: argparse.Namespace, *options: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, "-m", "tests.fakes.openai_server", "--port-file", str(port_file), "--model", "judge"]
        process = subprocess.Popen([*command, "--latency-ms", str(args.latency_ms), *options], cwd=ROOT)
        try:
            while not port_file.exists() or not port_file.read_text():
                if process.poll() is not None:
                    sys.exit("the server did not start")
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port_file.read_text().strip()}/v1"
        finally:
            process.terminate()
            process.wait()


async def ours(args: argparse.Namespace, url: str, work: list[Trajectory]) -> Run:
    """The endpoint checker, all trajectories at once, as a reward worker with many rollouts sees them."""
    with tempfile.TemporaryDirectory() as folder:
        settings = JudgeSettings(
            backend="endpoint",
            base_url=url,
            model="judge",
            n_votes=args.votes,
            concurrency=args.limit,
            max_tokens=64,
            timeout_s=args.deadline_s / 2,
            deadline_s=max(args.deadline_s, 2 * _ideal(args)),  # all trajectories of this run wait from its start on
            cache=CacheSettings(dir=folder),
        )
        checker = build_checker(settings)

        async def one(trajectory: Trajectory) -> float:
            start = time.perf_counter()
            votes = await checker.check(trajectory, {})
            assert len(votes.readable) == args.votes
            return time.perf_counter() - start

        try:
            return await _timed([lambda item=item: one(item) for item in work], args.votes * len(work))
        finally:
            await checker.close()


async def bare(args: argparse.Namespace, url: str, bodies: list[bytes], limit: int | None = None) -> Run:
    """aiohttp and a semaphore."""
    slots = asyncio.Semaphore(limit or args.limit)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(body: bytes) -> float:
            async with slots, session.post(f"{url}/chat/completions", data=body, headers=headers) as reply:
                await reply.read()
            return 0.0

        return await _timed([lambda body=body: one(body) for body in bodies], len(bodies))


async def sdk(args: argparse.Namespace, url: str, bodies: list[bytes]) -> Run:
    """The official client."""
    import openai

    slots = asyncio.Semaphore(args.limit)
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:

        async def one(body: bytes) -> float:
            async with slots:
                await client.chat.completions.create(**json.loads(body))
            return 0.0

        return await _timed([lambda body=body: one(body) for body in bodies], len(bodies))


async def rate_limited(args: argparse.Namespace, url: str, bodies: list[bytes]) -> Run:
    """verl's manager, whose reward function posts the request and reads the digit."""
    import torch
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.limited import RateLimitedRewardManager

    headers = {"Content-Type": "application/json"}
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def score(extra_info: dict, **_: object) -> float:
        async with session.post(f"{url}/chat/completions", data=extra_info["body"], headers=headers) as reply:
            return float('"verdict": 1' in (await reply.json())["choices"][0]["message"]["content"])

    class Decoder:
        def decode(self, ids: object, skip_special_tokens: bool) -> str:
            return ""

    config = OmegaConf.create({"reward": {"max_concurrent": args.limit, "timeout": args.deadline_s}})
    manager = RateLimitedRewardManager(config, Decoder(), compute_score=score)

    def row(body: bytes) -> DataProto:
        fields = {"data_source": ["x"], "reward_model": [{"ground_truth": ""}], "extra_info": [{"body": body}]}
        ones = torch.ones(1, 8, dtype=torch.long)
        return DataProto.from_dict({"responses": ones[:, :4], "attention_mask": ones}, non_tensors=_objects(fields))

    async def one(data: DataProto) -> float:
        await manager.run_single(data)
        return 0.0

    rows = [row(body) for body in bodies]
    try:
        return await _timed([lambda data=data: one(data) for data in rows], len(bodies))
    finally:
        await session.close()


def _objects(fields: dict) -> dict:
    import numpy as np

    arrays = {}
    for key, values in fields.items():
        arrays[key] = np.empty(len(values), dtype=object)
        arrays[key][:] = values
    return arrays


def _quiet() -> None:
    """What is loaded is not looked through by the garbage collector again, as in a reward worker."""
    gc.collect()
    gc.freeze()


async def _timed(tasks: list[Callable[[], Awaitable[float]]], requests: int) -> Run:
    _quiet()
    stalls: list[float] = []
    pauses: list[float] = []
    note = _note_collections(pauses)
    gc.callbacks.append(note)
    watch = asyncio.create_task(_watch_loop(stalls, pauses))
    start, cpu = time.perf_counter(), time.process_time()
    waits = await asyncio.gather(*(task() for task in tasks))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    watch.cancel()
    gc.callbacks.remove(note)
    longest = [1000 * max(times, default=0.0) for times in (stalls, pauses)]
    return Run(seconds, cpu, requests, max(waits), *longest)


async def _watch_loop(stalls: list[float], pauses: list[float], every: float = 0.005) -> None:
    """Seconds by which each short sleep overran, without those of the garbage collector."""
    while True:
        start, collected = time.perf_counter(), sum(pauses)
        await asyncio.sleep(every)
        stalls.append(time.perf_counter() - start - every - (sum(pauses) - collected))


def _note_collections(pauses: list[float]) -> Callable[[str, dict], None]:
    """A callback of the garbage collector that notes how long each collection takes."""
    begun = 0.0

    def note(phase: str, _: dict) -> None:
        nonlocal begun
        if phase == "start":
            begun = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - begun)

    return note


def _ideal(args: argparse.Namespace, requests: int | None = None) -> float:
    return (requests or args.trajectories * args.votes) * args.latency_ms / 1000 / args.limit


def report(args: argparse.Namespace, runs: dict[str, Run]) -> None:
    """Print the table."""
    total, ideal = args.trajectories * args.votes, _ideal(args)
    title = f"{args.trajectories} trajectories x {args.votes} votes, latency {args.latency_ms:g} ms, limit {args.limit}"
    table = Table(title=f"{title}: ideal {ideal:.2f} s")
    for column in (
        "client",
        "seconds",
        "x ideal",
        "CPU ms a request",
        "longest trajectory s",
        "longest stall ms",
        "collection ms",
    ):
        table.add_column(column, justify="left" if column == "client" else "right")
    for name, run in runs.items():
        seconds = run.seconds * total / run.requests
        longest = f"{run.longest:.2f}" if run.longest else "-"
        stalls = f"{run.stall_ms:.0f}", f"{run.collection_ms:.0f}"
        cost = f"{1000 * run.cpu / run.requests:.2f}"
        table.add_row(name, f"{seconds:.2f}", f"{seconds / ideal:.2f}", cost, longest, *stalls)
    Console(width=120).print(table)
    lost = 1 - runs["rltr"].seconds / runs["rltr, 1 % hung"].seconds
    Console().print(f"with 1 % of the requests hung: {100 * lost:.1f} % less throughput")


if __name__ == "__main__":
    main()
