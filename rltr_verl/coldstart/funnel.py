"""How many candidates are left after each rule, and what every difficulty yields: figures, tables and a plot."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rltr_verl.coldstart.ledger import Candidate, Reason
from rltr_verl.coldstart.store import Folder
from rltr_verl.errors import DiskError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

STAGES: tuple[tuple[str, tuple[Reason, ...]], ...] = (
    ("sampled", ()),
    ("played", (Reason.EMPTY, Reason.REFUSAL, Reason.DUPLICATE, Reason.FAILED)),
    ("well formed", (Reason.MALFORMED,)),
    ("no policy error", (Reason.POLICY_ERROR,)),
    ("no tool fault", (Reason.TOOL_FAULT,)),
    ("not held out", (Reason.CONTAMINATED,)),
    ("scored", (Reason.UNSCORED,)),
    ("complete", (Reason.BELOW_THRESHOLD,)),
    ("best of n", (Reason.NOT_BEST,)),
    ("balanced", (Reason.BALANCE,)),
)
"""What is left, and the reasons that drop the others on the way there."""

_ORDER = {reason: place for place, reason in enumerate(Reason)}


@dataclass(frozen=True)
class Stage:
    """What is left after a rule: samples, the queries that have one, and the samples' share of all."""

    name: str
    samples: int
    queries: int
    share: float


@dataclass(frozen=True)
class Yield:
    """What a difficulty yields: queries, samples, those that reached the threshold, those kept, and queries with one.

    ``share``: of the queries, those with a kept sample.
    """

    queries: int
    samples: int
    complete: int
    kept: int
    queries_kept: int
    share: float


@dataclass(frozen=True)
class Funnel:
    """The figures of a selection.

    Attributes:
        judge: who judged.
        stages: in the order of the rules.
        reasons: candidates by reason, ``best`` included.
        details: how often each breach of the format and each policy error occurs, by candidates.
        scores: candidates by score, those without left out.
        difficulties: see :class:`Yield`.
        lost: queries of which no sample is left, by the rule that dropped the last one.
    """

    judge: str
    stages: tuple[Stage, ...]
    reasons: dict[str, int]
    details: dict[str, dict[str, int]]
    scores: dict[str, int]
    difficulties: dict[str, Yield]
    lost: dict[str, int]

    @classmethod
    def of(cls, candidates: Sequence[Candidate], judge: str) -> Funnel:
        """Count settled candidates."""
        reasons = Counter(item.reason for item in candidates)
        scores = Counter(f"{item.score:.2f}" for item in candidates if item.score is not None)
        return cls(
            judge=judge,
            stages=_stages(candidates),
            reasons={reason.value: reasons[reason] for reason in Reason if reasons[reason]},
            details={
                "format": _sorted(fault for item in candidates for fault in item.format),
                "policy_errors": _sorted(kind for item in candidates for kind in item.policy_errors),
            },
            scores=dict(sorted(scores.items())),
            difficulties=_difficulties(candidates),
            lost=_lost(candidates),
        )

    @property
    def kept(self) -> int:
        """Candidates in the selection."""
        return self.reasons.get(Reason.BEST.value, 0)

    @property
    def queries(self) -> int:
        """Queries that have a sample, kept or not."""
        return self.stages[0].queries

    def write(self, place: Folder) -> None:
        """Write ``funnel.json`` and ``funnel.png``.

        Raises:
            DiskError: one of them cannot be written.
        """
        try:
            text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
            place.funnel.write_bytes(text.encode("utf-8", "replace") + b"\n")
            self._plot(place)
        except OSError as error:
            where, fix = str(place.root), "choose another folder or free some space."
            raise DiskError(f"cannot be written ({error.strerror or error})", where=where, fix=fix) from None

    def tables(self) -> list[Table]:
        """The stages, the reasons and the difficulties, for a terminal."""
        left = _table("left", "samples", "queries", "share")
        for stage in self.stages:
            left.add_row(stage.name, str(stage.samples), str(stage.queries), f"{stage.share:.1%}")
        dropped = _table("dropped", "samples")
        for reason, count in self.reasons.items():
            if reason != Reason.BEST.value:
                dropped.add_row(reason, str(count))
        yields = _table("difficulty", "queries", "samples", "complete", "kept", "queries with one")
        for name, row in self.difficulties.items():
            counts = (row.queries, row.samples, row.complete, row.kept)
            yields.add_row(name, *map(str, counts), f"{row.queries_kept} ({row.share:.1%})")
        return [left, *([dropped] if dropped.row_count else []), yields]

    def _plot(self, place: Folder) -> None:
        from matplotlib.figure import Figure

        shown = dict(list(self.difficulties.items())[:_DRAWN])
        rows = max(len(self.stages), len(shown))
        figure = Figure(figsize=(11, 1.4 + 0.36 * rows), layout="constrained", facecolor="white")
        title = f"Cold start: {self.kept:,} of {self.stages[0].samples:,} trajectories kept"
        figure.suptitle(title, color=INK, fontsize=13, fontweight="bold")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        left_over = {stage.name: stage.samples for stage in self.stages}
        _bars(left, "Left after each rule", left_over, "trajectories")
        _bars(right, "Queries with a kept one", {name: row.share for name, row in shown.items()}, "share", 1.0)
        for axes in (left, right):
            axes.set_ylim(rows - 0.4, -0.6)  # bars of one height on both sides
        figure.savefig(place.funnel_plot, dpi=130, metadata={"Software": None})


INK, LINE, GRID = "#1f2933", "#2563eb", "#e4e7eb"
_DRAWN = 40
"""Difficulties in the plot; funnel.json and the table hold all."""


def _bars(axes: Axes, title: str, shown: Mapping[str, float], unit: str, top: float = 0.0) -> None:
    """Horizontal bars from top to bottom, each with its value behind it."""
    places, values = range(len(shown)), list(shown.values())
    bars = axes.barh(places, values, color=LINE, height=0.7)
    labels = [f"{value:.0%}" if top else f"{value:,}" for value in values]
    axes.bar_label(bars, labels, padding=3, fontsize=8, color=INK)
    axes.set_yticks(places, [_printable(name) for name in shown], fontsize=8, color=INK)
    axes.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    axes.set_xlabel(unit, fontsize=8, color=INK)
    axes.set_xlim(0, 1.15 * (top or max(values, default=0) or 1))
    axes.tick_params(labelsize=8, colors=INK)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _printable(name: str) -> str:
    """What the font can draw; a dollar sign would begin a formula."""
    short = name if len(name) <= 24 else name[:21] + "..."
    return short.encode("ascii", "backslashreplace").decode().replace("$", r"\$")


def _stages(candidates: Sequence[Candidate]) -> tuple[Stage, ...]:
    left, found = list(candidates), []
    for name, reasons in STAGES:
        left = [item for item in left if item.reason not in reasons]
        queries = len({item.query_id for item in left})
        found.append(Stage(name, len(left), queries, len(left) / len(candidates) if candidates else 0.0))
    return tuple(found)


def _difficulties(candidates: Sequence[Candidate]) -> dict[str, Yield]:
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for item in candidates:
        groups[item.difficulty].append(item)
    return {name: _yield(groups[name]) for name in sorted(groups)}


def _yield(group: Sequence[Candidate]) -> Yield:
    queries = {item.query_id for item in group}
    kept = [item for item in group if item.kept]
    with_one = len({item.query_id for item in kept})
    complete = sum(_ORDER[item.reason] > _ORDER[Reason.BELOW_THRESHOLD] for item in group if item.reason)
    return Yield(len(queries), len(group), complete, len(kept), with_one, with_one / len(queries))


def _lost(candidates: Sequence[Candidate]) -> dict[str, int]:
    furthest: dict[str, Reason] = {}
    for item in candidates:
        assert item.reason is not None
        before = furthest.setdefault(item.query_id, item.reason)
        if _ORDER[item.reason] > _ORDER[before]:
            furthest[item.query_id] = item.reason
    counts = Counter(furthest.values())
    return {reason.value: counts[reason] for reason in Reason if counts[reason] and reason is not Reason.BEST}


def _sorted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _table(first: str, *others: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
