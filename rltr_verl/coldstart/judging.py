"""Who judges the candidates, and their verdicts: appended as they come, and never asked for twice.

The score is the mean of the judge's votes (RLTR Eq. 2). By default the teacher itself judges, as in the paper (3.1,
A.3): the model that sampled also picks the best of n. A verdict is found again by the sample and everything that it
depends on, so another judge, another prompt or a sample made anew is judged anew, and a resumed run goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rltr_verl.coldstart.interrupts import run_interruptibly
from rltr_verl.coldstart.ledger import Candidate, Reason
from rltr_verl.coldstart.records import Sample
from rltr_verl.coldstart.store import Appender, read_lines
from rltr_verl.config import JudgeSettings, RltrSettings, TeacherSettings
from rltr_verl.errors import ConfigError, JudgeOutage, Unscored
from rltr_verl.judge import Checker, build_checker
from rltr_verl.judge.prompting import load_prompt, load_prompt_file

Who = Literal["auto", "teacher", "settings"]
Notice = Callable[[int, float], None]
"""Told how many more candidates have a verdict (or none to be had), and what they cost."""

PATIENCE = 64
"""Candidates in a row without a verdict after which a model that judges counts as down."""

_ELSEWHERE = frozenset(
    {"base_url", "api_key_env", "timeout_s", "deadline_s", "retries", "concurrency", "rest_s", "budget", "cache"}
    | {"max_unscored_share", "prompt", "language"}
)
"""Settings that do not change what a verdict says; prompt and language are in the prompt's version."""


@dataclass(frozen=True)
class Judge:
    """Who judges: settings of the checker, and a name for people."""

    settings: JudgeSettings
    name: str

    @cached_property
    def depends_on(self) -> dict[str, Any]:
        """What a verdict depends on besides the sample: plain JSON values."""
        if self.settings.backend == "checklist":
            return {"backend": "checklist", "credit": self.settings.credit}
        return {**self.settings.model_dump(exclude=set(_ELSEWHERE)), "prompt": _prompt_version(self.settings)}

    def key(self, record: Mapping[str, Any]) -> str:
        """Names the verdict on a line of ``samples.jsonl``.

        A digest of the trajectory, the row's needs and :attr:`depends_on`.
        """
        parts = [self.depends_on, record["trajectory"], record["task"]["info"].get("needs")]
        return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()


def choose_judge(settings: RltrSettings, teacher: TeacherSettings, who: Who = "auto") -> Judge:
    """The judge that ``who`` asks for.

    Args:
        settings: its node ``judge`` sets votes, temperature, prompt and the like in any case.
        teacher: who sampled.
        who: ``settings`` is ``rltr.judge``; ``teacher`` is the teacher's endpoint, with its model, key, concurrency
            and prices, or the checklist where the teacher is scripted; ``auto`` is ``settings`` where ``rltr.judge``
            says who judges, else ``teacher``.

    Raises:
        ConfigError: the teacher has no endpoint, or ``rltr.judge`` names one and does not use it.
    """
    judge = settings.judge
    named = judge.model_fields_set & {"backend", "base_url", "model"}
    if judge.backend == "checklist" and named & {"base_url", "model"}:
        fix = "add judge.backend=endpoint."
        raise ConfigError("a model is given, but the backend is checklist", where="rltr.judge", fix=fix)
    if who == "settings" or (who == "auto" and named):
        return Judge(judge, _name(judge))
    if teacher.backend == "scripted":
        checklist = judge.model_copy(update={"backend": "checklist"})
        return Judge(checklist, f"{_name(checklist)} (the teacher is scripted)")
    if not teacher.base_urls or not teacher.model:
        fix = "give teacher.base_url and teacher.model, or a judge of its own: judge.backend=endpoint (or checklist)."
        raise ConfigError("nothing says which endpoint the teacher is", where="rltr.teacher", fix=fix)
    return Judge(_at_endpoint_of(teacher, judge), f"the teacher, {teacher.model}")


class Judging:
    """Verdicts on candidates, from ``path`` or from the judge.

    Args:
        judge: who is asked.
        path: the file of verdicts.
        read: the sample of a candidate.
        notice: told of progress.
        open_checker: makes the checker once there is something to ask; by default the judge's own, in this process.
    """

    def __init__(
        self,
        judge: Judge,
        path: Path,
        read: Callable[[Candidate], Sample],
        notice: Notice,
        open_checker: Callable[[], Checker] | None = None,
    ) -> None:
        self._judge, self._path, self._read, self._notice = judge, path, read, notice
        self._open_checker = open_checker or (lambda: build_checker(judge.settings))
        self._failed_in_a_row = 0

    def restore(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Give known verdicts to the candidates; returns those that have none yet."""
        by_key = {(item.id, item.verdict_key): item for item in candidates}
        for line in read_lines(self._path):
            item = by_key.get((str(line.get("id")), line.get("key")))
            if item is not None and line.get("score") is not None:
                item.votes, item.score = tuple(line["votes"]), line["score"]
        return [item for item in candidates if item.score is None]

    def ask(self, candidates: Sequence[Candidate]) -> None:
        """Have the judge score the candidates; one that it could not score is ``unscored``.

        Raises:
            JudgeOutage: the judge is down, see :meth:`_give_up`, or none or too few candidates could be scored. The
                verdicts that came stay in the file.
            DataError: a row holds what the judge needs in an unreadable form.
            DiskError: the verdicts cannot be written.
        """
        if not candidates:
            return
        with Appender(self._path) as verdicts:
            run_interruptibly(lambda: self._all(candidates, verdicts))

    async def _all(self, candidates: Sequence[Candidate], verdicts: Appender) -> None:
        """As many candidates at a time as the judge may have requests, so that each finished one is let go."""
        checker = self._open_checker()
        waiting = iter(candidates)
        count = min(self._judge.settings.concurrency, len(candidates))
        workers = [asyncio.ensure_future(self._work(waiting, checker, verdicts)) for _ in range(count)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await checker.close()

    async def _work(self, waiting: Iterator[Candidate], checker: Checker, verdicts: Appender) -> None:
        for item in waiting:
            verdict = await self._verdict(item, checker)
            verdicts.add({"id": item.id, "key": item.verdict_key, "judge": self._judge.name, **verdict})
            self._notice(1, verdict["cost"])
            self._give_up(item)
            await asyncio.sleep(0)  # a checker that never waits would not let Ctrl-C through

    async def _verdict(self, item: Candidate, checker: Checker) -> dict[str, Any]:
        sample = self._read(item)
        assert sample.trajectory is not None
        try:
            votes = await checker.check(sample.trajectory, {**sample.task.info, "id": item.id})
        except Unscored as failure:
            item.settle(Reason.UNSCORED, str(failure))
            return {"votes": [], "score": None, "failure": str(failure), "cost": 0.0}
        item.votes, item.score = votes.values, votes.mean
        return {"votes": list(item.votes), "score": item.score, "cost": sum(vote.cost for vote in votes.votes)}

    def _give_up(self, item: Candidate) -> None:
        """Stop where a model has failed for :data:`PATIENCE` candidates in a row: all others would wait in vain."""
        self._failed_in_a_row = self._failed_in_a_row + 1 if item.score is None else 0
        settings = self._judge.settings
        patient = settings.backend == "checklist" or settings.max_unscored_share == 1
        if self._failed_in_a_row >= PATIENCE and not patient:
            raise outage(f"{PATIENCE} candidates in a row could not be judged", item, self._judge)


def outage(problem: str, last: Candidate, judge: Judge) -> JudgeOutage:
    """The error of a judge that is down; what was judged is kept."""
    fix = "mend that and run it again: what has been judged is kept; judge.max_unscored_share=1 goes on all the same."
    return JudgeOutage(f"{problem}. The last, {last.id}: {last.detail}", where=f"judge: {judge.name}", fix=fix)


def _at_endpoint_of(teacher: TeacherSettings, judge: JudgeSettings) -> JudgeSettings:
    shared = {name: getattr(teacher, name) for name in ("base_url", "model", "api_key_env")}
    if "concurrency" not in judge.model_fields_set:
        shared["concurrency"] = teacher.concurrency
    prices = {name: getattr(teacher.budget, name) for name in ("price_prompt", "price_completion")}
    missing = {name: price for name, price in prices.items() if name not in judge.budget.model_fields_set}
    budget = judge.budget.model_copy(update=missing)
    return judge.model_copy(update={"backend": "endpoint", **shared, "budget": budget})


def _name(judge: JudgeSettings) -> str:
    return "the rows' needs" if judge.backend == "checklist" else f"{judge.model} (rltr.judge)"


def _prompt_version(judge: JudgeSettings) -> str:
    return (load_prompt_file(judge.prompt) if judge.prompt else load_prompt("completeness", judge.language)).version


def teacher_of(run: Mapping[str, Any], settings: RltrSettings) -> TeacherSettings:
    """Who sampled: what ``run.json`` remembers, and over it what ``rltr.teacher`` gives."""
    scripted = {"backend": "scripted"} if run.get("depends_on", {}).get("teacher.backend") == "scripted" else {}
    given = settings.teacher.model_dump(exclude_unset=True)
    return TeacherSettings.model_validate({**scripted, **(run.get("teacher") or {}), **given})
