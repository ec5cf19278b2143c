"""Verdicts a second of the judge's cache from several processes at once, and whether any is lost or doubled.

    python benchmarks/judge_cache.py [--processes 2] [--verdicts 20000] [--rounds 5] [--dir FOLDER] [--json FILE]

All processes share one cache folder and start together; a rate is the verdicts of all of them over the time from the
common start to the last one's end. Each figure is the median of ``--rounds`` rounds. Keys are made before the clock
starts; what one key costs (SHA-256 over a prompt of 4,000 characters) is given on a line of its own.

"warm read": every process reads every verdict. "cold write": every process writes its own half of an empty cache.
"same keys": all processes write the same verdicts, so that all collide. The ideals beside them: a look-up in a plain
dict of JSON texts, and one prepared SELECT (or INSERT in a transaction of its own) on a bare two-column SQLite table in
WAL mode. JSON is read and written on every side.

Lost: verdicts that were written and are absent or different at the end. Doubled: rows beyond one per key.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rltr_verl.config import CacheSettings
from rltr_verl.judge.cache import VerdictCache

TARGET = 5000
Work = Callable[[], float]  # one process's part of a round; returns its longest single operation in seconds


@dataclass(frozen=True)
class Round:
    """Operations a second of all processes together, and the longest single operation."""

    rate: float
    longest_s: float


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        run(args, Path(folder))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--verdicts", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="make the cache here instead of the system's temporary folder")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path) -> None:
    """All rounds; contenders take turns within a round."""
    keys, key_s = make_keys(args.verdicts)
    rounds: dict[str, list[Round]] = {}
    faults: Counter[str] = Counter(lost=0, doubled=0)
    for number in range(args.rounds):
        place = folder / str(number)
        place.mkdir()
        _plain(place / "plain.db").close()  # two processes that switch a new file to WAL lock each other out
        for name, work in contenders(place, keys, args.processes).items():
            rounds.setdefault(name, []).append(measure(work, args.processes, len(keys), shared="own" not in name))
        for name in ("own", "same"):
            faults.update(count_faults(place / name, keys))
    report(rounds, faults, key_s, args)


def make_keys(n: int) -> tuple[list[str], float]:
    """Keys of ``n`` requests, and seconds per key."""
    prompt = "The record of calls. " * 190
    start = time.perf_counter()
    keys = [_key(prompt, vote) for vote in range(n)]
    return keys, (time.perf_counter() - start) / n


def _key(prompt: str, vote: int) -> str:
    messages = [{"role": "user", "content": prompt}]
    return VerdictCache.key(model="m", prompt_version="v", sampling={"temperature": 0.7}, vote=vote, messages=messages)


def value_of(key: str) -> dict[str, Any]:
    """A verdict with a reason of usual length, which depends on the key."""
    return {"verdict": float(int(key[-1], 16) % 2), "reason": f"{key} " * 3, "prompt_tokens": 1000}


def contenders(folder: Path, keys: list[str], processes: int) -> dict[str, Callable[[int], Work]]:
    """Per name a function from the process's number to its work. Writers come before the readers of what they wrote."""

    def own(worker: int) -> list[str]:
        return keys[worker::processes]

    return {
        "cold write, own keys": lambda worker: write_cache(folder / "own", own(worker)),
        "SQLite insert, own keys": lambda worker: write_plain(folder / "plain.db", own(worker)),
        "cold write, same keys": lambda worker: write_cache(folder / "same", keys),
        "warm read": lambda worker: read_cache(folder / "own", keys),
        "SQLite select": lambda worker: read_plain(folder / "plain.db", keys),
        "dict": lambda worker: read_dict(keys),
    }


def measure(work: Callable[[int], Work], processes: int, n_keys: int, shared: bool) -> Round:
    """One round in fresh processes."""
    context = multiprocessing.get_context("fork")
    ready, results = context.Barrier(processes), context.SimpleQueue()
    workers = [context.Process(target=_run_one, args=(work, number, ready, results)) for number in range(processes)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()
    if any(process.exitcode for process in workers):
        raise SystemExit("a process of the benchmark failed")
    spans = [results.get() for _ in workers]
    start, end = min(span[0] for span in spans), max(span[1] for span in spans)
    return Round(n_keys * (processes if shared else 1) / (end - start), max(span[2] for span in spans))


def _run_one(work: Callable[[int], Work], number: int, ready: Any, results: Any) -> None:
    part = work(number)
    ready.wait(60)
    start = time.perf_counter()  # one clock for all processes of a machine
    longest = part()
    results.put((start, time.perf_counter(), longest))


def each(keys: list[str], one: Callable[[str], Any]) -> float:
    """Do ``one`` for every key; the longest in seconds."""
    longest, before = 0.0, time.perf_counter()
    for key in keys:
        one(key)
        after = time.perf_counter()
        longest, before = max(longest, after - before), after
    return longest


def write_cache(folder: Path, keys: list[str]) -> Work:
    """Verdicts into the cache, to the disk at the latest when it closes."""
    cache = VerdictCache(CacheSettings(dir=str(folder)))

    def work() -> float:
        longest = each(keys, lambda key: cache.put(key, value_of(key)))
        cache.close()
        return longest

    return work


def read_cache(folder: Path, keys: list[str]) -> Work:
    """Every verdict out of the cache; a wrong one ends the benchmark."""
    cache = VerdictCache(CacheSettings(dir=str(folder)))

    def one(key: str) -> None:
        if cache.get(key) is None:
            raise SystemExit(f"{key} is lost")

    return lambda: each(keys, one)


def _plain(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=60, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute("CREATE TABLE IF NOT EXISTS t (key TEXT PRIMARY KEY, value TEXT)")
    return connection


def write_plain(path: Path, keys: list[str]) -> Work:
    """The same into a bare table."""
    connection = _plain(path)
    insert = "INSERT OR REPLACE INTO t VALUES (?, ?)"
    return lambda: each(keys, lambda key: connection.execute(insert, (key, json.dumps(value_of(key)))))


def read_plain(path: Path, keys: list[str]) -> Work:
    """The same out of a bare table."""
    connection = _plain(path)
    select = "SELECT value FROM t WHERE key = ?"
    return lambda: each(keys, lambda key: json.loads(connection.execute(select, (key,)).fetchone()[0]))


def read_dict(keys: list[str]) -> Work:
    """The same out of a dict of JSON texts."""
    texts = {key: json.dumps(value_of(key)) for key in keys}
    return lambda: each(keys, lambda key: json.loads(texts[key]))


def count_faults(folder: Path, keys: list[str]) -> dict[str, int]:
    """Verdicts lost, and rows beyond one per key."""
    cache = VerdictCache(CacheSettings(dir=str(folder)))
    lost = sum(cache.get(key) != value_of(key) for key in keys)
    cache.close()
    with sqlite3.connect(folder / "rltr_verdicts" / "cache.db") as connection:
        rows, distinct = connection.execute("SELECT COUNT(*), COUNT(DISTINCT key) FROM Cache").fetchone()
    return {"lost": lost, "doubled": rows - distinct}


def report(rounds: dict[str, list[Round]], faults: Counter[str], key_s: float, args: argparse.Namespace) -> None:
    """Print the table; write the JSON if asked."""
    rates = {name: statistics.median(one.rate for one in done) for name, done in rounds.items()}
    longest = {name: statistics.median(one.longest_s for one in done) for name, done in rounds.items()}
    ideals = {"warm read": ("SQLite select", "dict"), "cold write, own keys": ("SQLite insert, own keys",)}
    table = Table(title=f"{args.verdicts} verdicts, {args.processes} processes, {args.rounds} rounds")
    for column in ("", "verdicts/s", "longest one, ms", "share of the ideal"):
        table.add_column(column, justify="left" if not column else "right")
    for name, rate in rates.items():
        shares = [f"{rate / rates[ideal]:.2f} of {ideal}" for ideal in ideals.get(name, ())]
        table.add_row(name, f"{rate:,.0f}", f"{longest[name] * 1e3:.1f}", ", ".join(shares))
    console = Console(width=120)
    console.print(table)
    console.print(f"one key: {key_s * 1e6:.0f} us; lost: {faults['lost']}, doubled: {faults['doubled']}")
    met = rates["warm read"] >= TARGET and not any(faults.values())
    console.print(f"target of {TARGET:,} warm verdicts/s with none lost or doubled: {'met' if met else 'MISSED'}")
    if args.json:
        figures = {"verdicts_per_second": rates, "longest_s": longest, "key_s": key_s, **faults}
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
