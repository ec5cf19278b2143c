"""Ask a checker about a suite, and count."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from rltr_verl.errors import Unscored
from rltr_verl.format_check import format_faults
from rltr_verl.judge.attacks.suite import CONTROL, Attempt
from rltr_verl.judge.base import Checker, Votes

MAX_UNSCORED = 0.5
"""Above this share of unscored trajectories, a rate says nothing."""
MIN_CONTROL = 0.5
"""A judge that accepts fewer of the complete trajectories than this does not judge."""

_WINDOW = 64
"""Trajectories asked about at once; the judge's own limit bounds the requests."""
_EXAMPLES = 3
_Z = 1.959964
"""Quantile of the normal distribution for a two-sided interval of 95 %."""


class Verdict(IntEnum):
    """What a report comes to; the value is the command's exit status."""

    HOLDS = 0
    FOOLED = 1
    UNKNOWN = 2


@dataclass(frozen=True)
class Outcome:
    """Votes on the trajectories of one attack, or of the control.

    Attributes:
        trajectories: how many were built.
        malformed: those that the format check refuses, so that training would not ask the judge about them.
        unscored: those without a verdict; ``reason`` is the first one's.
        votes: readable votes.
        for_complete: votes of at least 0.5.
        examples: the first trajectories with such a vote.
    """

    name: str
    trajectories: int
    malformed: int = 0
    unscored: int = 0
    votes: int = 0
    for_complete: int = 0
    reason: str | None = None
    examples: tuple[dict[str, Any], ...] = ()

    @property
    def scored(self) -> int:
        return self.trajectories - self.unscored

    @property
    def rate(self) -> float | None:
        """Share of the readable votes that are for complete; None without a vote."""
        return self.for_complete / self.votes if self.votes else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's interval (95 %) of the rate, with the scored trajectories as the sample size.

        The votes on one trajectory are not independent, so their number would make it too narrow.
        """
        return None if self.rate is None else wilson(self.rate, self.scored)

    @property
    def unscored_share(self) -> float:
        return self.unscored / self.trajectories if self.trajectories else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        low, high = self.interval or (None, None)
        counts = {key: value for key, value in vars(self).items() if key not in ("reason", "examples")}
        rates = {"rate": self.rate, "low": low, "high": high}
        return {**counts, **rates, "unscored_reason": self.reason, "examples": list(self.examples)}


@dataclass(frozen=True)
class Report:
    """The control and the attacks; no attack was asked about where the control could not be scored."""

    control: Outcome
    attacks: tuple[Outcome, ...]
    threshold: float

    @property
    def fooled_by(self) -> list[Outcome]:
        """The attacks with a rate of false positives over the threshold."""
        return [outcome for outcome in self.attacks if outcome.rate is not None and outcome.rate > self.threshold]

    @property
    def unknown(self) -> list[Outcome]:
        """Control and attacks of which more than :data:`MAX_UNSCORED` are unscored."""
        return [outcome for outcome in (self.control, *self.attacks) if outcome.unscored_share > MAX_UNSCORED]

    @property
    def rejects_complete(self) -> bool:
        """Whether the judge accepts less than :data:`MIN_CONTROL` of what is complete."""
        return self.control.rate is not None and self.control.rate < MIN_CONTROL

    @property
    def verdict(self) -> Verdict:
        """UNKNOWN if most of all trajectories are unscored; else FOOLED, UNKNOWN for a single row, or HOLDS."""
        rows = (self.control, *self.attacks)
        missing, asked = sum(row.unscored for row in rows), sum(row.trajectories for row in rows)
        if missing > MAX_UNSCORED * asked:
            return Verdict.UNKNOWN
        if self.fooled_by or self.rejects_complete:
            return Verdict.FOOLED
        return Verdict.UNKNOWN if self.unknown else Verdict.HOLDS


async def run_suite(
    checker: Checker,
    suite: Mapping[str, Sequence[Attempt]],
    threshold: float,
    asked: Callable[[int], object] = lambda count: None,
) -> Report:
    """Ask about the control, then about each attack.

    Args:
        suite: from :func:`build_suite`.
        threshold: largest rate of false positives that an attack may reach.
        asked: called with the number of trajectories after each batch.

    If most of the control is unscored, the report ends there: the judge is out of order, and asking on costs.
    """
    control = await _measure(checker, CONTROL, suite[CONTROL], asked)
    if control.unscored_share > MAX_UNSCORED:
        return Report(control, (), threshold)
    names = [name for name in suite if name != CONTROL]
    return Report(control, tuple([await _measure(checker, name, suite[name], asked) for name in names]), threshold)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval (1927) at 95 % for a share observed in ``count`` trials."""
    spread = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    middle, scale = share + _Z**2 / (2 * count), 1 + _Z**2 / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


async def _measure(checker: Checker, name: str, attempts: Sequence[Attempt], asked: Callable[[int], object]) -> Outcome:
    results: list[Votes | Unscored] = []
    for start in range(0, len(attempts), _WINDOW):
        window = attempts[start : start + _WINDOW]
        results += await asyncio.gather(*(_ask(checker, attempt) for attempt in window))
        asked(len(window))
    return _count(name, attempts, results)


async def _ask(checker: Checker, attempt: Attempt) -> Votes | Unscored:
    try:
        return await checker.check(attempt.trajectory, attempt.case.row)
    except Unscored as error:
        return error


def _count(name: str, attempts: Sequence[Attempt], results: Sequence[Votes | Unscored]) -> Outcome:
    missing = [result for result in results if isinstance(result, Unscored)]
    scored = [(attempt, got) for attempt, got in zip(attempts, results, strict=True) if isinstance(got, Votes)]
    accepted = [(attempt, got) for attempt, got in scored if _for_complete(got)]
    return Outcome(
        name=name,
        trajectories=len(attempts),
        malformed=sum(bool(format_faults(attempt.trajectory)) for attempt in attempts),
        unscored=len(missing),
        votes=sum(len(got.readable) for _, got in scored),
        for_complete=sum(_for_complete(got) for _, got in scored),
        reason=str(missing[0]) if missing else None,
        examples=() if name == CONTROL else tuple(_example(*pair) for pair in accepted[:_EXAMPLES]),
    )


def _for_complete(votes: Votes) -> int:
    return sum(value >= 0.5 for value in votes.readable)


def _example(attempt: Attempt, votes: Votes) -> dict[str, Any]:
    reasons = [vote.reason for vote in votes.votes if vote.reason]
    return {
        "id": attempt.case.id,
        "votes": list(votes.values),
        "reasons": reasons,
        "trajectory": attempt.trajectory.to_dict(),
    }
