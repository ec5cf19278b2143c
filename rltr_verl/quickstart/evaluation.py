"""Roll a model out on fixed queries and score it as training does."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rltr_verl.rollout.local import LocalModel, LocalSampling
from rltr_verl.scoring import ScoredTrajectory, Scorer
from rltr_verl.trajectory import Trajectory


@dataclass(frozen=True)
class Evaluated:
    """One query with its trajectory and figures (``completeness``, ``calls``, ``reward``, ``format_ok``)."""

    row: Mapping[str, Any]
    trajectory: Trajectory
    figures: Mapping[str, float]

    @property
    def kind(self) -> str:
        """The query's kind."""
        return str(self.row["extra_info"]["kind"])

    @property
    def n_needs(self) -> int:
        """Calls that a complete trajectory must hold."""
        return len(json.loads(self.row["extra_info"]["needs"]))

    def record(self) -> dict[str, Any]:
        """Plain JSON values."""
        query = {key: self.row["extra_info"][key] for key in ("index", "split", "kind", "lang", "query")}
        return {**query, **self.figures, "trajectory": self.trajectory.to_dict()}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a split."""
    return pq.read_table(path).to_pylist()


def evaluate(
    model: LocalModel,
    scorer: Scorer,
    rows: Sequence[Mapping[str, Any]],
    sampling: LocalSampling,
    on_done: Callable[[], None] | None = None,
) -> list[Evaluated]:
    """Roll out and score every row, in order."""
    trajectories = model.roll_out(rows, sampling, on_done)
    scored = asyncio.run(_score(scorer, trajectories, rows))
    return [
        Evaluated(row, trajectory, _figures(result))
        for row, trajectory, result in zip(rows, trajectories, scored, strict=True)
    ]


def summarize(evaluated: Sequence[Evaluated]) -> dict[str, Any]:
    """``n`` and the means of ``completeness``, ``calls``, ``reward``, ``format_ok``; the same per kind in ``kinds``."""
    by_kind: dict[str, list[Evaluated]] = defaultdict(list)
    for item in evaluated:
        by_kind[item.kind].append(item)
    return {**_means(evaluated), "kinds": {kind: _means(items) for kind, items in sorted(by_kind.items())}}


def write_trajectories(path: Path, evaluated: Iterable[Evaluated]) -> None:
    """One JSON line per query."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(item.record(), ensure_ascii=False) + "\n" for item in evaluated)
    path.write_text("".join(lines), encoding="utf-8")


async def _score(
    scorer: Scorer, trajectories: Sequence[Trajectory], rows: Sequence[Mapping[str, Any]]
) -> list[ScoredTrajectory]:
    pairs = zip(trajectories, rows, strict=True)
    return list(await asyncio.gather(*(scorer.score(one, dict(row["extra_info"])) for one, row in pairs)))


def _figures(scored: ScoredTrajectory) -> dict[str, float]:
    metrics = scored.metrics
    figures = {"completeness": metrics["acc"], "calls": metrics["calls"], "format_ok": metrics["format_ok"]}
    return figures if scored.total is None else {**figures, "reward": scored.total}


def _means(items: Sequence[Evaluated]) -> dict[str, Any]:
    keys = ("completeness", "calls", "reward", "format_ok")
    values = {key: [item.figures[key] for item in items if key in item.figures] for key in keys}
    return {"n": len(items), **{key: sum(found) / len(found) for key, found in values.items() if found}}
