"""Cases from the offline world: its queries, played by the oracle with the real tools."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rltr_verl.judge.attacks.cases import Case, case_of
from rltr_verl.judge.checklist import parse_needs
from rltr_verl.tooling import Tool, schemas
from rltr_verl.trajectory import Trajectory
from rltr_verl.world import load_world
from rltr_verl.world.build import load_world_tools, query_row
from rltr_verl.world.facts import make_facts
from rltr_verl.world.policies import Oracle, play
from rltr_verl.world.splits import SPLITS, make_splits

_MIN_NEEDS = 2
"""With one need, leaving it out leaves no call that was of use: too easy."""


def world_cases(folder: str | Path) -> list[Case]:
    """Cases from the validation queries of a world that was built before.

    Raises:
        WorldError: no complete world of this version is there.
    """
    world = load_world(folder)
    rows = pq.read_table(world.split("val")).to_pylist()
    return list(_play(rows, load_world_tools(world.corpus)))


def fresh_world_cases(seed: int, count: int) -> list[Case]:
    """About ``count`` cases or more from the world of ``seed``, of which nothing stays on disk."""
    facts = make_facts(seed)
    sizes = dict.fromkeys(SPLITS, 0) | {"train": max(128, 3 * count)}
    queries = make_splits(facts, seed, sizes)["train"]
    rows = [query_row(query, "train", index) for index, query in enumerate(queries)]
    with tempfile.TemporaryDirectory(prefix="rltr_attack.") as scratch:
        corpus = Path(scratch) / "facts.jsonl"
        corpus.write_text("".join(json.dumps(line) + "\n" for line in facts.documents()), encoding="utf-8")
        return list(_play(rows, load_world_tools(corpus)))


def _play(rows: Iterable[Mapping[str, Any]], tools: Mapping[str, Tool]) -> Iterator[Case]:
    callables = {name: tool.call for name, tool in tools.items()}
    described = schemas(tools)
    for row in rows:
        info = row["extra_info"]
        needs = parse_needs(info["needs"], f"query {info['index']}")
        if needs is not None and len(needs) >= _MIN_NEEDS:
            told = Trajectory.from_messages(play(Oracle(), row, callables), info["query"], tools=described)
            case = case_of(f"{info['split']}-{info['index']}", told, needs)
            if case is not None:
                yield case
