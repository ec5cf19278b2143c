"""Writes down what became of each task, at once, and counts."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rltr_verl.coldstart.outcomes import classify, turns_digest
from rltr_verl.coldstart.queries import Skipped
from rltr_verl.coldstart.records import Outcome, Sample, Task, Usage
from rltr_verl.coldstart.samples import Past
from rltr_verl.coldstart.store import Appender
from rltr_verl.coldstart.teacher import Played, TeacherFailed


@dataclass
class Summary:
    """Figures of a run; they grow while it lasts.

    Attributes:
        total: samples wanted, queries x n.
        outcomes: samples by what became of them: those of earlier runs and of this one; ``failed`` is of this run only.
        reasons: why attempts failed in this run.
        usage: tokens and money of all attempts of this folder; its seconds are those of the trajectories.
        spent: the same, of this run alone.
        seconds: wall time of this run.
        skipped, repeated: rows of the queries that cannot be used, or ask what another one asks.
        queries: queries that can be used.
        interrupted: the run was asked to stop (Ctrl-C, SIGTERM).
    """

    total: int = 0
    queries: int = 0
    skipped: int = 0
    repeated: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    usage: Usage = field(default_factory=Usage)
    spent: Usage = field(default_factory=Usage)
    made: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def done(self) -> int:
        """Samples that are not made again."""
        return sum(count for outcome, count in self.outcomes.items() if outcome.is_final)

    @property
    def kept(self) -> int:
        """Trajectories."""
        return self.outcomes[Outcome.OK]

    @property
    def failed(self) -> int:
        """Attempts of this run that the surroundings spoilt; a later run makes them again."""
        return self.outcomes[Outcome.FAILED]

    @property
    def left(self) -> int:
        """Samples still to be made, failed ones among them."""
        return self.total - self.done

    @property
    def yielded(self) -> float | None:
        """Share of the finished samples that are trajectories; None if there is none."""
        return self.kept / self.done if self.done else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until all tasks are through, at this run's pace."""
        waiting = self.left - self.failed
        return self.seconds / self.made * waiting if self.made else None


class Recorder:
    """Appends samples and keeps the figures.

    Args:
        file: ``samples.jsonl``.
        past: what earlier runs left; its digests tell duplicates.
        summary: gets the figures.
        teacher: name that stands in each sample.
    """

    def __init__(self, file: Appender, past: Past, summary: Summary, teacher: str) -> None:
        self._file, self._turns, self._teacher = file, past.turns, teacher
        self._started = time.monotonic()
        self.summary = summary
        summary.outcomes.update(past.outcomes)
        summary.usage += past.usage

    def played(self, task: Task, played: Played) -> None:
        """A task that was played to its end."""
        outcome, reason = classify(played.trajectory)
        digest = turns_digest(task.query_id, played.trajectory)
        if outcome is Outcome.OK and digest in self._turns:
            outcome, reason = Outcome.DUPLICATE, "the same turns as an earlier sample of the query"
        self._add(Sample(task, outcome, played.trajectory, reason, self._teacher, played.usage))
        if outcome is Outcome.OK:
            self._turns.add(digest)

    def failed(self, task: Task, failure: TeacherFailed) -> None:
        """A task that failed through no fault of the teacher's."""
        self._add(Sample(task, Outcome.FAILED, None, failure.reason, self._teacher, failure.usage))
        self.summary.reasons[failure.reason[:200]] += 1

    def tick(self) -> Summary:
        """The figures as of now."""
        self.summary.seconds = time.monotonic() - self._started
        return self.summary

    def _add(self, sample: Sample) -> None:
        self._file.add(line_of(sample))
        summary = self.tick()
        summary.outcomes[sample.outcome] += 1
        summary.made += 1
        summary.usage += sample.usage
        summary.spent += sample.usage


def line_of(sample: Sample) -> dict[str, Any]:
    """What :meth:`Sample.to_dict` gives, without copying what is only written: a third of the time of a sample."""
    return {"id": sample.id, **_plain(sample)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, dict)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return {name: _plain(item) for name, item in vars(value).items()}


def summary_of(total: int, queries: int, skipped: Skipped) -> Summary:
    """Figures of a run that has not begun."""
    return Summary(total, queries, skipped.rows, skipped.repeated)
