"""What a file of queries came to: counts per split, what was dropped, how long the prompts are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltr_verl.data.query import Query

SPLITS = ("train", "val")
_SHOWN = 12
"""Values of one kind that get a line of their own."""


@dataclass
class Summary:
    """Figures of one build, and where its files are.

    Attributes:
        rows: rows that were read, blank lines left out.
        dropped: reason -> rows.
        counts: (kind, value, split) -> rows; kinds are queries, language, difficulty, tools, needs, reference, prompt.
        prompt_tokens: split -> tokens of each prompt with the row's tools shown; empty without a model.
        files: split -> file written.
        first: the first rows kept, as they are written.
    """

    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    prompt_tokens: dict[str, list[int]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    files: dict[str, Path] = field(default_factory=dict)
    first: list[dict[str, Any]] = field(default_factory=list)

    def add(self, query: Query, language: str, prompt: str | None, split: str) -> None:
        """Count one row that is kept."""
        kinds = {
            "queries": "",
            "language": language,
            "difficulty": query.difficulty or "not given",
            "tools": ", ".join(query.tools) if query.tools else "all",
            "needs": "not given" if query.needs is None else f"{len(json.loads(query.needs))}",
            "reference": "not given" if query.reference is None else "given",
            "prompt": prompt or "none",
        }
        self.counts.update((kind, value, split) for kind, value in kinds.items())

    def count(self, kind: str, value: str = "", split: str = "train") -> int:
        """Rows of a split with this value."""
        return self.counts[kind, value, split]

    def lines(self) -> Iterator[tuple[str, int, int]]:
        """(what, rows of train, rows of val), the most frequent values first and the rest in one line."""
        for kind in dict.fromkeys(kind for kind, _, _ in self.counts):
            values = Counter[str]()
            for (other, value, _), rows in self.counts.items():
                if other == kind:
                    values[value] += rows
            ranked = sorted(values, key=lambda value: (-values[value], value))
            for value in ranked[:_SHOWN]:
                yield f"{kind}: {value}" if value else kind, self.count(kind, value), self.count(kind, value, "val")
            rest = ranked[_SHOWN:]
            if rest:
                train, val = (sum(self.count(kind, value, split) for value in rest) for split in SPLITS)
                yield f"{kind}: {len(rest)} others", train, val
