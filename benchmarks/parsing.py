"""Turns a second of parsing, format check and penalties on one core, and whether memory stays flat.

    python benchmarks/parsing.py [--rounds 7] [--trajectories 100000] [--json FILE]

The turns are those of seeded trajectories of 2 to 8 turns, in English and Chinese: a thought of 20 to 80 phrases, one
or two calls of which some repeat and some are broken, the stop marker at the end. "ours": ``parse_turn`` on every turn,
then format check, repeats and errors of every trajectory. Beside it, over the same turns: ``json.loads`` of the calls'
bodies, cut out beforehand (the ideal: no parser can do less), verl's hermes parser as its ``tool_agent`` awaits it
(text in place of ids, so nothing is decoded), and that parser's regular expression and ``json.loads`` alone. The
contenders take turns within a round; a figure is the median over the rounds, in CPU time of the process.

Then ``--trajectories`` trajectories are read and scored one after the other, and the memory of the process (RSS) is
printed after every tenth of them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from verl.experimental.agent_loop import tool_parser
from verl.experimental.agent_loop.tool_parser import HermesToolParser

from rltr_verl.format_check import format_faults
from rltr_verl.parsing import parse_turn
from rltr_verl.reward_fns.error import count_errors
from rltr_verl.reward_fns.repeat import count_repeats
from rltr_verl.trajectory import Observation, Status, Trajectory, Turn

TARGET = 20_000
WORDS = ("the temperature of", "Arlen", "is needed before", "both towns", "can be compared", "so I search for", "it")
HANZI = "先查一下这座城市的人口和面积然后再比较两者的大小并且确认年份是否一致"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    made = [trajectory_texts(random.Random(seed)) for seed in range(500)]
    logging.getLogger(tool_parser.__file__).setLevel(logging.CRITICAL)  # else verl's time is that of its log
    rates = speed(made, args.rounds)
    memory = memory_over(made, args.trajectories)
    report(made, rates, memory)
    if args.json:
        args.json.write_text(json.dumps({"turns_per_s": rates, "rss_mib": memory}, indent=1), encoding="utf-8")


def trajectory_texts(source: random.Random) -> list[str]:
    """What a policy writes in one trajectory, turn by turn."""
    turns = [call_turn(source) for _ in range(source.randint(1, 7))]
    if source.random() < 0.3:
        turns.append(turns[-1])
    return [*turns, f"<think>\n{thought(source)}\n</think>\n\n<answer>"]


def call_turn(source: random.Random) -> str:
    calls = "\n".join(call_block(source) for _ in range(source.choice((1, 1, 1, 2))))
    return f"<think>\n{thought(source)}\n</think>\n\n{calls}<|im_end|>"


def thought(source: random.Random) -> str:
    if source.random() < 0.3:
        return "".join(source.choices(HANZI, k=source.randint(40, 160)))
    return " ".join(source.choices(WORDS, k=source.randint(20, 80)))


def call_block(source: random.Random) -> str:
    query = source.choice(("temperature of Arlen", "人口 北京", "how does f(x) = {x} behave", "Brona's elevation"))
    arguments = {"query": query, "k": source.randint(1, 4), "filter": {"years": [2019, 2023], "lang": "en"}}
    body = json.dumps({"name": "search", "arguments": arguments}, ensure_ascii=source.random() < 0.5)
    return f"<tool_call>\n{body[:-1] if source.random() < 0.05 else body}\n</tool_call>"


def ours(texts: list[str]) -> Trajectory:
    """Read and judge one trajectory as rollout and reward do, up to the judge."""
    turns = tuple(observed(parse_turn(text)) for text in texts)
    trajectory = Trajectory("q", turns)
    format_faults(trajectory)
    count_repeats(trajectory)
    count_errors(trajectory)
    return trajectory


def observed(turn: Turn) -> Turn:
    """The turn with an observation per call, as a tool runner would give it."""
    seen = tuple(Observation("r", Status.UNREADABLE if call.error else Status.OK, call.name) for call in turn.calls)
    return Turn(turn.text, turn.thought, turn.calls, turn.answer, turn.stopped, turn.faults, seen)


class _Texts:
    """A tokenizer for a parser that is given text."""

    def decode(self, text: str) -> str:
        return text


def contenders(made: list[list[str]]) -> dict[str, Callable[[], object]]:
    parser = HermesToolParser(_Texts())
    texts = list(itertools.chain(*made))
    bodies = [body for text in texts for body in parser.tool_call_regex.findall(text)]
    sound = [body for body in bodies if body.strip().endswith("}}}")]

    async def verl_parser() -> None:
        for text in texts:
            await parser.extract_tool_calls(text)

    return {
        "ours: parse, format, penalties": lambda: [ours(item) for item in made],
        "ours: parse alone": lambda: [parse_turn(text) for text in texts],
        "ideal: json.loads of the bodies": lambda: [json.loads(body) for body in sound],
        "verl's hermes parser": lambda: asyncio.run(verl_parser()),
        "its regex and json.loads alone": lambda: [_regex_and_json(parser, text) for text in texts],
    }


def _regex_and_json(parser: HermesToolParser, text: str) -> list[object]:
    found: list[object] = []
    for body in parser.tool_call_regex.findall(text):
        try:
            found.append(json.loads(body))
        except ValueError:
            continue
    parser.tool_call_regex.sub("", text)
    return found


def speed(made: list[list[str]], rounds: int) -> dict[str, float]:
    """Median turns a CPU second of each contender."""
    turns = sum(map(len, made))
    seen: dict[str, list[float]] = {}
    for name, work in [*contenders(made).items()] * rounds:
        start = time.process_time()
        work()
        seen.setdefault(name, []).append(turns / (time.process_time() - start))
    return {name: statistics.median(rates) for name, rates in seen.items()}


def memory_over(made: list[list[str]], count: int) -> list[float]:
    """RSS in MiB after every tenth of ``count`` trajectories."""
    process, step = psutil.Process(), max(1, count // 10)
    seen = []
    for number in range(1, count + 1):
        ours(made[number % len(made)])
        if number % step == 0:
            seen.append(process.memory_info().rss / 2**20)
    return seen


def report(made: list[list[str]], rates: dict[str, float], memory: list[float]) -> None:
    texts = list(itertools.chain(*made))
    length = statistics.mean(map(len, texts))
    title = f"{len(texts)} turns of {length:.0f} characters on average, one core"
    table = Table("", "turns/s", "us a turn", title=title)
    for name, rate in rates.items():
        table.add_row(name, f"{rate:,.0f}", f"{1e6 / rate:.1f}")
    console = Console()
    console.print(table)
    rate = rates["ours: parse, format, penalties"]
    console.print(f"target {TARGET:,} turns/s: {'met' if rate >= TARGET else 'missed'} ({rate / TARGET:.1f}x)")
    console.print("RSS in MiB after every tenth: " + " ".join(f"{value:.1f}" for value in memory))
    console.print(f"growth from the first tenth to the last: {memory[-1] - memory[0]:+.1f} MiB")


if __name__ == "__main__":
    main()
