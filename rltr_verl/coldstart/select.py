"""From all sampled trajectories to those worth learning from (RLTR 3.1): rules, a judge, best of n.

The rules in order; the first that applies is the reason in the ledger:

1. ``empty``, ``refusal``, ``duplicate``, ``failed``: there is no trajectory to judge.
2. ``malformed``: a breach of the format, as in training (:mod:`rltr_verl.format_check`).
3. ``policy_error``: one call that cannot be read, names no tool or breaks a schema drops the whole trajectory. Masking
   the call would still leave it in the context of what follows, and show the planner how to go on from a mistake it
   should not make.
4. ``tool_fault``, only with ``tool_faults="drop"``: a tool failed. By default such a trajectory stays: the fault is not
   the teacher's, a teacher that tries again after a timeout shows what is wanted, and one that could not go on is
   incomplete for the judge.
5. ``contaminated``: the query stands in a held-out file, or nearly so.
6. ``unscored``: the judge failed. That is no score of 0; a later run has the candidate judged again.
7. ``below_threshold``: not more than half of the votes call the trajectory complete, or another threshold.
8. ``not_best``: the query has ``keep`` better ones.
9. ``balance``: the difficulty has more than its cap.

Memory holds figures of the candidates, not their texts: each pass reads ``samples.jsonl`` line by line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rltr_verl.coldstart.contamination import HeldOut, Match
from rltr_verl.coldstart.funnel import Funnel
from rltr_verl.coldstart.judging import Judge, Judging, Who, choose_judge, outage, teacher_of
from rltr_verl.coldstart.ledger import Candidate, Reason, candidate_of
from rltr_verl.coldstart.ranking import balance, keep_best
from rltr_verl.coldstart.records import Outcome, Sample
from rltr_verl.coldstart.store import Folder, write_lines
from rltr_verl.config import RltrSettings
from rltr_verl.errors import ConfigError, DataError
from rltr_verl.judge import Checker

Notice = Callable[[str, int, int, float], None]
"""Told of progress: the stage (``read``, in bytes, or ``judged``, in candidates), how many more are done, how many
there are in all, and what these cost."""


def _silent(*_: Any) -> None:
    """No progress is shown."""


@dataclass(frozen=True)
class SelectOptions:
    """How candidates are selected.

    Attributes:
        keep: trajectories a query may keep.
        min_score: lowest score that is kept; None: more than half of the votes.
        held_out: files of queries that must not be trained on; JSON lines, CSV or parquet.
        near: Jaccard similarity from which a query counts as a near duplicate of a held-out one, in (0, 1].
        balance: ``equal`` caps every difficulty at the smallest one's number of kept trajectories times
            ``balance_ratio``.
        seed: draws between equal scores where ``balance`` drops some.
        tool_faults: whether a trajectory in which a tool failed is kept.
        judge: who judges, see :func:`rltr_verl.coldstart.judging.choose_judge`.
        ray: address of a Ray cluster, ``auto`` for the one that this machine belongs to, ``local`` for one that is
            started here and now; None judges in this process.
        ray_workers: processes that judge, on Ray.
        notice: told of progress.
    """

    keep: int = 1
    min_score: float | None = None
    held_out: tuple[Path, ...] = ()
    near: float = 0.8
    balance: Literal["none", "equal"] = "none"
    balance_ratio: float = 1.0
    seed: int = 1
    tool_faults: Literal["keep", "drop"] = "keep"
    judge: Who = "auto"
    ray: str | None = None
    ray_workers: int = 2
    notice: Notice = field(default=_silent, repr=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        sound = {
            "keep": self.keep >= 1,
            "min_score": self.min_score is None or 0 <= self.min_score <= 1,
            "near": 0 < self.near <= 1,
            "balance_ratio": self.balance_ratio > 0,
        }
        for name, fine in sound.items():
            if not fine:
                fix = "keep >= 1, 0 <= min_score <= 1, 0 < near <= 1, balance_ratio > 0."
                raise ConfigError(f"{getattr(self, name)} is out of range", where=f"select: {name}", fix=fix)

    def passes(self, score: float) -> bool:
        """Whether a score reaches the threshold."""
        return score > 0.5 if self.min_score is None else score >= self.min_score


def select(folder: str | Path, settings: RltrSettings, options: SelectOptions | None = None) -> Funnel:
    """Judge the samples of a cold start and keep the best; writes the ledger, the selection and the funnel.

    The same samples, verdicts, settings and options give the same bytes. Not to be called from a running event loop.

    Args:
        folder: of the cold start, with ``samples.jsonl``.
        settings: the node ``rltr``: format, judge and teacher.
        options: see :class:`SelectOptions`.

    Raises:
        ConfigError: nothing says who judges, or the judge's settings are wrong.
        DataError: a line of the samples, a held-out row or a row's needs cannot be read.
        JudgeOutage: the judge is down, or more than ``rltr.judge.max_unscored_share`` is unscored; what it has judged
            is kept in ``verdicts.jsonl``.
        DiskError: the folder cannot be written, or another run is judging.
    """
    options, place = options or SelectOptions(), Folder(Path(folder))
    judge = choose_judge(settings, teacher_of(_run(place), settings), options.judge)
    held_out = HeldOut.read(options.held_out, options.near)
    samples = SampleFile(place.samples)
    candidates = _candidates(samples, _FirstRules(settings, options, held_out, judge), options.notice)
    _score([item for item in candidates if item.reason is None], judge, place, samples, options)
    _rank(candidates, options)
    return _write(place, candidates, samples, judge)


class SampleFile:
    """The lines of ``samples.jsonl``, in turn or by where they begin."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def size(self) -> int:
        """Bytes.

        Raises:
            DataError: there is no such file.
        """
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            fix = "sample first: rltr coldstart sample."
            raise DataError("no samples here", where=str(self._path), fix=fix) from None

    def lines(self) -> Iterator[tuple[int, int, dict[str, Any], Sample]]:
        """Offset and length of each whole line in bytes, the line decoded, and its sample.

        Raises:
            DataError: names the line that holds no sample.
        """
        offset = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n") and line.strip():
                    yield offset, len(line), *self._decoded(line, number)
                offset += len(line)

    def read(self, offset: int) -> Sample:
        """The sample whose line begins at ``offset``."""
        return Sample.from_dict(self.record(offset))

    def record(self, offset: int) -> dict[str, Any]:
        """The line that begins at ``offset``, decoded."""
        with self._path.open("rb") as file:
            file.seek(offset)
            found: dict[str, Any] = json.loads(file.readline())
            return found

    def _decoded(self, line: bytes, number: int) -> tuple[dict[str, Any], Sample]:
        try:
            record = json.loads(line)
            return record, Sample.from_dict(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            where, fix = f"{self._path}, line {number}", "delete the line; what it held is sampled again."
            raise DataError(f"no sample ({type(error).__name__}: {error})", where=where, fix=fix) from None


class _FirstRules:
    """What can be decided about a sample alone, without a judge."""

    def __init__(self, settings: RltrSettings, options: SelectOptions, held_out: HeldOut, judge: Judge) -> None:
        self._settings, self._options, self._held_out, self._judge = settings, options, held_out, judge
        self._known: dict[bytes, Match | None] = {}

    def __call__(self, sample: Sample, record: Mapping[str, Any], offset: int) -> Candidate:
        item = candidate_of(sample, offset, self._settings)
        if not self._settle(item, sample):
            item.verdict_key = self._judge.key(record)
        return item

    def _settle(self, item: Candidate, sample: Sample) -> bool:
        """Whether a rule drops it."""
        if item.outcome is not Outcome.OK:
            item.settle(Reason(item.outcome.value), sample.reason)
        elif item.format:
            item.settle(Reason.MALFORMED, ", ".join(item.format))
        elif item.policy_errors:
            item.settle(Reason.POLICY_ERROR, ", ".join(f"{kind} {n}" for kind, n in item.policy_errors.items()))
        elif item.tool_faults and self._options.tool_faults == "drop":
            item.settle(Reason.TOOL_FAULT, f"{item.tool_faults} of {item.n_calls} calls")
        elif match := self._match(_query_of(sample)):
            item.settle(Reason.CONTAMINATED, str(match))
        return item.reason is not None

    def _match(self, query: str) -> Match | None:
        key = hashlib.blake2b(query.encode("utf-8", "replace"), digest_size=16).digest()
        if key not in self._known:
            self._known[key] = self._held_out.match(query)
        return self._known[key]


def _query_of(sample: Sample) -> str:
    assert sample.trajectory is not None
    return str(sample.task.info.get("query") or sample.trajectory.query)


def _run(place: Folder) -> dict[str, Any]:
    """What ``run.json`` says of the sampling; nothing if it is not there."""
    try:
        found: dict[str, Any] = json.loads(place.run.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        fix = "delete the file, and name the judge: --set judge.backend=..."
        raise DataError(f"not valid JSON ({error})", where=str(place.run), fix=fix) from None
    return found


def _candidates(samples: SampleFile, rules: _FirstRules, notice: Notice) -> list[Candidate]:
    """One candidate a sample, ordered by query and number; of a sample with several lines the last one holds."""
    size, found = samples.size, dict[str, Candidate]()
    for offset, length, record, sample in samples.lines():
        found[sample.id] = rules(sample, record, offset)
        notice("read", length, size, 0.0)
    return sorted(found.values(), key=lambda item: (item.query_id, item.number))


def _score(
    candidates: Sequence[Candidate], judge: Judge, place: Folder, samples: SampleFile, options: SelectOptions
) -> None:
    """Give each candidate its score, or the reason ``unscored``."""

    def notice(count: int, cost: float) -> None:
        options.notice("judged", count, len(candidates), cost)

    opener = _opener(judge, options)
    judging = Judging(judge, place.verdicts, lambda item: samples.read(item.offset), notice, opener)
    waiting = judging.restore(candidates)
    notice(len(candidates) - len(waiting), 0.0)
    judging.ask(waiting)
    missing = [item for item in candidates if item.score is None]
    if missing and len(missing) > min(judge.settings.max_unscored_share * len(candidates), len(candidates) - 1):
        raise outage(f"{len(missing)} of {len(candidates)} candidates could not be judged", missing[-1], judge)


def _opener(judge: Judge, options: SelectOptions) -> Callable[[], Checker] | None:
    """How the judge's checker is made on Ray; None in this process."""
    address, workers = options.ray, options.ray_workers
    if address is None:
        return None
    from rltr_verl.coldstart.ray_judge import RayChecker

    return lambda: RayChecker(address, workers, judge.settings)


def _rank(candidates: Sequence[Candidate], options: SelectOptions) -> None:
    """Threshold, best of n, balance."""
    for item in candidates:
        if item.reason is None and item.score is not None and not options.passes(item.score):
            wanted = "more than 0.5" if options.min_score is None else f"at least {options.min_score:g}"
            item.settle(Reason.BELOW_THRESHOLD, f"score {item.score:.2f}, wanted: {wanted}")
    keep_best((item for item in candidates if item.reason is None), options.keep)
    if options.balance == "equal":
        balance(candidates, options.balance_ratio, options.seed)


def _write(place: Folder, candidates: Sequence[Candidate], samples: SampleFile, judge: Judge) -> Funnel:
    funnel = Funnel.of(candidates, judge.name)
    write_lines(place.selected, (samples.record(item.offset) for item in candidates if item.kept))
    write_lines(place.ledger, (item.to_dict() for item in candidates))
    funnel.write(place)
    return funnel
