"""Queries of the cold start that stand in a held-out file too, or nearly so.

``exact``: equal after :func:`rltr_verl.data.pool.folded` (NFKC, case, spaces, the closing mark). ``near``: the Jaccard
similarity of the sets of character n-grams of the folded texts, |A and B| / |A or B|, is at least a threshold.
Characters, not words, so that Chinese needs no segmentation.

The similarity is exact and no pair is missed, unlike with MinHash: an index lists the held-out rows of each gram, so
that counting the rows over all grams of a query gives |A and B| for every B at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from rltr_verl.data.pool import folded
from rltr_verl.data.reading import iter_rows
from rltr_verl.errors import DataError
from rltr_verl.rows import mended, read_rows

NGRAM = 3
"""Characters of a gram; a text with fewer characters is compared exactly only."""

_SHOWN = 60


@dataclass(frozen=True)
class Match:
    """The held-out row that a query resembles most."""

    kind: Literal["exact", "near"]
    similarity: float
    where: str
    text: str

    def __str__(self) -> str:
        shown = self.text if len(self.text) <= _SHOWN else self.text[: _SHOWN - 3] + "..."
        return f"{self.kind} {self.similarity:.2f}: {self.where}: {shown}"


class HeldOut:
    """An index of held-out queries.

    Args:
        near: similarity from which a query counts as a near duplicate, in (0, 1].
        size: characters of a gram.
    """

    def __init__(self, near: float = 0.8, size: int = NGRAM) -> None:
        self._near, self._size = near, size
        self._rows: list[tuple[str, str]] = []  # folded text, where
        self._exact: dict[str, int] = {}
        self._holding: dict[str, array[int]] = {}  # gram -> rows
        self._counts = array("i")  # grams of each row

    @classmethod
    def read(cls, paths: Sequence[Path], near: float) -> HeldOut:
        """The queries of files that ``rltr data`` reads or has written.

        Raises:
            DataError: names the file and the row that has no readable query.
        """
        found = cls(near)
        for path in paths:
            for where, text in _queries(path):
                found.add(text, where)
        return found

    def __len__(self) -> int:
        return len(self._exact)

    def add(self, query: str, where: str) -> None:
        """Take in a query; of equal ones the first is remembered."""
        text, row = folded(query), len(self._rows)
        if self._exact.setdefault(text, row) != row:
            return
        self._rows.append((text, where))
        grams = self._grams(text)
        self._counts.append(len(grams))
        for gram in grams:
            self._holding.setdefault(gram, array("i")).append(row)

    def match(self, query: str) -> Match | None:
        """The most similar held-out query, the first of equally similar ones; None if none is similar enough."""
        if not self._rows:
            return None
        text = folded(query)
        if text in self._exact:
            return self._named("exact", 1.0, self._exact[text])
        row, similarity = self._most_similar(self._grams(text))
        return self._named("near", similarity, row) if similarity >= self._near else None

    def _most_similar(self, grams: frozenset[str]) -> tuple[int, float]:
        """The first row of the highest Jaccard similarity, and that."""
        found = [np.frombuffer(self._holding[gram], np.intc) for gram in grams if gram in self._holding]
        if not found:
            return 0, 0.0
        shared = np.bincount(np.concatenate(found), minlength=len(self._rows))
        similarities = shared / (len(grams) + np.frombuffer(self._counts, np.intc) - shared)
        row = int(similarities.argmax())
        return row, float(similarities[row])

    def _named(self, kind: Literal["exact", "near"], similarity: float, row: int) -> Match:
        text, where = self._rows[row]
        return Match(kind, similarity, where, text)

    def _grams(self, text: str) -> frozenset[str]:
        return frozenset(text[start : start + self._size] for start in range(len(text) - self._size + 1))


class _AllBut(frozenset[str]):
    """Holds every name but its own elements: the fields of a row that do not matter here."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


def _queries(path: Path) -> Iterator[tuple[str, str]]:
    """Where each query of a file stands, and its text; verl's parquet holds it in ``extra_info``."""
    parquet = path.suffix.lower() == ".parquet"
    rows = enumerate(read_rows(path), 1) if parquet else iter_rows(path, _AllBut({"query"}), _silent)
    for number, row in rows:
        if isinstance(row, DataError):
            raise row
        text = row.get("query") or (row.get("extra_info") or {}).get("query")
        where = f"{path}, row {number}"
        if not isinstance(text, str) or not text.strip():
            fix = "give the held-out query's text in a field 'query', or remove the row."
            raise DataError("no field 'query' with a text", where=where, fix=fix)
        yield where, mended(text)


def _silent(_: int) -> None:
    """No progress is shown: held-out files are small."""
