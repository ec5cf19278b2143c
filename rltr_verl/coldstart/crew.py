"""Plays tasks, many at the same time, until all are through, somebody asks to stop, or nothing more can be had."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

from rltr_verl.coldstart.interrupts import until_signal
from rltr_verl.coldstart.recording import Recorder, Summary
from rltr_verl.coldstart.records import Task
from rltr_verl.coldstart.teacher import Teacher, TeacherFailed
from rltr_verl.config import TeacherSettings
from rltr_verl.errors import DataError, RltrError

Watch = Callable[[Summary], None]

_TICK_S = 0.5
_WINDOW = 1.5
"""Trajectories under way for each request that may be in flight: while one runs its tools, another one asks."""
_FAILURES = 3
"""Failures in a row, for each request that may be in flight, after which a run that gets nowhere stops."""


class SamplingStopped(RltrError):
    """Nothing more can be had from the teacher. What is finished stays; the same command goes on."""


class Crew:
    """The players of a run.

    Args:
        recorder: gets what became of each task.
        tasks: are taken one by one, as there is room.
        settings: ``concurrency`` bounds the tasks under way, ``budget`` what the folder may cost.
        watch: gets the figures about twice a second, and at the end.
    """

    def __init__(self, recorder: Recorder, tasks: Iterator[Task], settings: TeacherSettings, watch: Watch) -> None:
        self._recorder, self._tasks, self._watch, self._budget = recorder, tasks, watch, settings.budget
        self._window = math.ceil(_WINDOW * settings.concurrency)
        self._patience = _FAILURES * settings.concurrency
        self._failures = 0

    async def run(self, open_teacher: Callable[[], Teacher]) -> None:
        """Play all; sets ``interrupted`` in the summary where SIGINT or SIGTERM has ended it early.

        Raises:
            SamplingStopped: the teacher fails for good, or the budget is spent.
        """
        stop, teacher = asyncio.Event(), open_teacher()
        try:
            with until_signal(stop):  # behind the opening: Ray sets a handler of its own
                await self._until(stop, teacher)
        finally:
            await teacher.close()
            self._watch(self._recorder.tick())

    async def _until(self, stop: asyncio.Event, teacher: Teacher) -> None:
        everybody = asyncio.create_task(self._everybody(teacher))
        asked, ticks = asyncio.create_task(stop.wait()), asyncio.create_task(self._tick())
        tasks: list[asyncio.Task[Any]] = [everybody, asked, ticks]
        try:
            await asyncio.wait([everybody, asked], return_when=asyncio.FIRST_COMPLETED)
            self._recorder.summary.interrupted = not everybody.done()
            if everybody.done():
                everybody.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _everybody(self, teacher: Teacher) -> None:
        """All players; none is left when this ends, however it ends."""
        players = [asyncio.create_task(self._play(teacher)) for _ in range(self._window)]
        try:
            await asyncio.gather(*players)
        finally:
            for player in players:
                player.cancel()
            await asyncio.gather(*players, return_exceptions=True)

    async def _play(self, teacher: Teacher) -> None:
        """One of many players: takes the next task whenever it has finished one."""
        for task in self._tasks:
            self._check_budget()
            try:
                played = await teacher.play(task)
            except (TeacherFailed, DataError) as error:
                self._fail(task, error if isinstance(error, TeacherFailed) else TeacherFailed(str(error)))
            else:
                self._recorder.played(task, played)
                self._failures = 0

    def _fail(self, task: Task, failure: TeacherFailed) -> None:
        self._recorder.failed(task, failure)
        self._failures += 1
        if failure.fatal:
            raise _stopped(f"the teacher cannot go on: {failure.reason}")
        if self._failures >= self._patience:
            raise _stopped(f"the last {self._failures} attempts have all failed; the last one: {failure.reason}")

    def _check_budget(self) -> None:
        """The budget is the folder's: all runs, processes and nodes count. What is in flight comes on top."""
        spent = self._recorder.summary.usage
        tokens = spent.prompt_tokens + spent.completion_tokens
        if self._budget.money is not None and spent.cost >= self._budget.money:
            raise _spent("money", f"{spent.cost:.4f}", f"{self._budget.money:g}")
        if self._budget.tokens is not None and tokens >= self._budget.tokens:
            raise _spent("tokens", f"{tokens:,} tokens", f"{self._budget.tokens:,}")

    async def _tick(self) -> None:
        while True:
            self._watch(self._recorder.tick())
            await asyncio.sleep(_TICK_S)


def _stopped(problem: str) -> SamplingStopped:
    fix = "mend it, then run the same command again: what is finished stays, what failed is tried again."
    return SamplingStopped(problem, where="rltr.teacher", fix=fix)


def _spent(name: str, spent: str, limit: str) -> SamplingStopped:
    where = f"rltr.teacher.budget.{name}"
    return SamplingStopped(f"{spent} spent, the limit is {limit}", where=where, fix=f"raise {where} to go on.")
