"""The good rows of one file of queries, and everything that is wrong with the others."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rltr_verl.data.query import Query, read_query
from rltr_verl.data.reading import iter_rows
from rltr_verl.data.writing import ParquetFileWriter
from rltr_verl.errors import DataError
from rltr_verl.rows import read_rows

if TYPE_CHECKING:
    from rltr_verl.rollout.turns import Planner

SHOWN_PROBLEMS = 20
"""Problems that a message names; the other rows are counted."""

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
_SCHEMA = pa.schema(
    [("row", pa.int64()), *((name, pa.string()) for name in ("query", "id", "needs", "reference", "difficulty"))]
    + [("tools", pa.list_(pa.string()))]
)

Checked = tuple[str, Query | None, list[DataError]]
Seen = dict[bytes, tuple[bytes, str]]
"""Digest of a folded query -> digest of the first such query as it stands, and its split."""


def folded(query: str) -> str:
    """What near duplicates share: the text after NFKC and case folding, without invisible characters, repeated spaces
    and the closing mark."""
    text = " ".join(_INVISIBLE.sub("", unicodedata.normalize("NFKC", query)).casefold().split())
    return text.rstrip(" .?!。…") or text


class Problems:
    """Rows that are wrong: the first problems, and how many rows."""

    def __init__(self) -> None:
        self.rows = 0
        self.named = 0
        self.first: list[DataError] = []

    def add(self, errors: list[DataError]) -> None:
        """Take note of one row."""
        self.rows += 1
        room = SHOWN_PROBLEMS - len(self.first)
        self.named += room > 0
        self.first += errors[:room]

    def raise_if_any(self, rows: int) -> None:
        """Raise DataError if one of the ``rows`` is wrong."""
        if self.rows:
            lines = ["rows that cannot be used:", *map(str, self.first)]
            if self.rows > self.named:
                lines.append(f"... and {self.rows - self.named} more rows")
            end = f"{self.rows} of {rows} rows cannot be used, so nothing is written."
            raise DataError("\n  ".join(lines) + "\n" + end, fix="correct them, then run it again.")


class RowChecks:
    """What can be checked of a row only beside the others, or with the model and the tools of the run.

    Args:
        planner: the tools and the chat template; None leaves them unchecked.
        measure: the prompt's tokens of a query; None measures nothing.
        limit: longest allowed prompt in tokens.
    """

    def __init__(self, planner: Planner | None, measure: Callable[[Query], int] | None, limit: int | None) -> None:
        self._planner, self._measure, self._limit = planner, measure, limit
        self._ids: dict[str, int] = {}
        self.tokens = array("L")

    def check(self, query: Query, where: str) -> list[DataError]:
        """Everything that is wrong with a row that is no duplicate."""
        wrong = self._id(query, where) + self._tools(query, where)
        return wrong or self._length(query, where)

    def _id(self, query: Query, where: str) -> list[DataError]:
        first = self._ids.setdefault(query.id, query.row) if query.id is not None else query.row
        if first == query.row:
            return []
        problem = f"field 'id': '{query.id}' is also that of row {first}, which asks something else"
        return [DataError(problem, where=where, fix="give each query an id of its own, or none.")]

    def _tools(self, query: Query, where: str) -> list[DataError]:
        if self._planner is None:
            return []
        known, fix = list(self._planner.schemas), "correct it, or add the tool: --set tools=[...]."
        named = {"tools": query.tools or (), "needs": [need["tool"] for need in json.loads(query.needs or "[]")]}
        return [
            DataError(f"field '{name}': no tool '{tool}' (tools: {', '.join(known) or 'none'})", where=where, fix=fix)
            for name, tools in named.items()
            for tool in tools
            if tool not in known
        ]

    def _length(self, query: Query, where: str) -> list[DataError]:
        if self._measure is None:
            return []
        tokens = self._measure(query)
        self.tokens.append(tokens)
        if self._limit is None or tokens <= self._limit:
            return []
        problem = f"the prompt has {tokens} tokens, --max-prompt-tokens is {self._limit}"
        return [DataError(problem, where=where, fix="shorten the query, show fewer tools, or raise the limit.")]


class Pool:
    """The good rows of one file, in a scratch file, in their order.

    Args:
        path: the scratch file.
        split: what the rows are meant for.
        seed: decides which rows :meth:`lowest` takes.
    """

    def __init__(self, path: Path, split: str, seed: int) -> None:
        self._path, self._split, self._seed = path, split, seed
        self.ranks = array("Q")
        """A number of each row, drawn from its query and the seed alone."""

    def fill(self, rows: Iterator[Checked], seen: Seen, checks: RowChecks, problems: Problems) -> Counter[str]:
        """Take the rows in; returns how many were read, and how many dropped by reason."""
        counts = Counter[str]()
        with ParquetFileWriter(self._path, _SCHEMA) as writer:
            for where, query, errors in rows:
                counts["read"] += 1
                if query is None:
                    problems.add(errors)
                    continue
                same = folded(query.query)
                if reason := self._repeats(query, same, seen):
                    counts[reason] += 1
                elif errors := checks.check(query, where):
                    problems.add(errors)
                else:
                    writer.add(vars(query))
                    self.ranks.append(int.from_bytes(_digest(f"{self._seed} {same}", 8), "big"))
        return counts

    def lowest(self, share: float) -> int:
        """The rank up to which there is ``share`` of the rows, but at least one and not all; -1 for a share of 0."""
        count = min(max(1, round(share * len(self.ranks))), len(self.ranks) - 1) if share else 0
        return sorted(self.ranks)[count - 1] if count else -1

    def queries(self) -> Iterator[Query]:
        """The rows, read back."""
        for row in read_rows(self._path):
            tools = row.pop("tools", None)
            yield Query(**row, tools=tuple(tools) if tools else None)

    def _repeats(self, query: Query, same: str, seen: Seen) -> str | None:
        """Why the row is dropped; the first row of its kind is remembered."""
        exact, key = _digest(query.query, 16), _digest(same, 16)
        if key not in seen:
            seen[key] = (exact, self._split)
            return None
        first, split = seen[key]
        if split != self._split:
            return f"asked in {split}"
        return "exact duplicate" if first == exact else "near duplicate"


def checked_rows(path: Path, ignore: frozenset[str], advance: Callable[[int], None]) -> Iterator[Checked]:
    """Where each row of the file stands, and the query or what is wrong with it."""
    for number, row in iter_rows(path, ignore, advance):
        where = f"{path}, row {number}"
        query, errors = (None, [row]) if isinstance(row, DataError) else read_query(row, number, where)
        yield where, query, errors


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
