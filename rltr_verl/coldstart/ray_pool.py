"""Teachers in the processes of a Ray cluster, used like one teacher.

The limit on requests in flight is the pool's: it is divided among the nodes, and on a node the workers share their part
(:class:`rltr_verl.judge.slots.NodeSlots`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rltr_verl.coldstart.actors import Actors, ActorsFailed, share
from rltr_verl.coldstart.records import Task, Usage
from rltr_verl.coldstart.teacher import Played, Teacher, TeacherFailed
from rltr_verl.config import RltrSettings
from rltr_verl.errors import DataError

_WINDOW = 1.5

Build = Callable[[RltrSettings, Any], Teacher]


@dataclass(frozen=True)
class _Lost:
    """A :class:`TeacherFailed` on its way between processes."""

    reason: str
    fatal: bool
    usage: Usage


class _Plays:
    """A teacher in a worker's process."""

    def __init__(self, teacher: Teacher) -> None:
        self._teacher = teacher

    async def handle(self, task: Task) -> Played | _Lost:
        """One task."""
        try:
            return await self._teacher.play(task)
        except TeacherFailed as error:
            return _Lost(error.reason, error.fatal, error.usage)
        except DataError as error:
            return _Lost(str(error), False, Usage())

    async def close(self) -> None:
        """Close the teacher."""
        await self._teacher.close()


@dataclass(frozen=True)
class _Opens:
    """Builds the teacher of a worker; ``model`` as the workers' nodes see it."""

    settings: RltrSettings
    model: str
    build: Build

    def __call__(self, nodes: int) -> _Plays:
        from rltr_verl.preflight import load_tokenizer

        return _Plays(self.build(share_of(self.settings, nodes), load_tokenizer(self.model, "--model")))


class RayPool(Teacher):
    """The pool; belongs to one event loop.

    Args:
        address, workers: see :class:`rltr_verl.coldstart.actors.Actors`.
        settings: of the whole pool.
        model: folder or hub name of the tokenizer, as the workers' nodes see it.
        build: makes a worker's teacher.

    Raises:
        ConfigError: there is no such cluster, or it has fewer CPUs than ``workers``.
    """

    name = "ray"

    def __init__(self, address: str, workers: int, settings: RltrSettings, model: str, build: Build) -> None:
        concurrency = settings.teacher.concurrency
        count = min(workers, concurrency)
        self._actors = Actors(address, count, _Opens(settings, model, build), math.ceil(_WINDOW * concurrency))

    async def play(self, task: Task) -> Played:
        try:
            found = await self._actors.submit(task)
        except ActorsFailed as error:
            raise TeacherFailed(error.reason, fatal=error.fatal) from None
        if isinstance(found, Played):
            return found
        raise TeacherFailed(found.reason, fatal=found.fatal, usage=found.usage)

    async def close(self) -> None:
        await self._actors.close()


def share_of(settings: RltrSettings, nodes: int) -> RltrSettings:
    """The settings of a worker where the pool has ``nodes`` nodes: each node sends its part of the requests."""
    part = share(settings.teacher.concurrency, nodes)
    return settings.model_copy(update={"teacher": settings.teacher.model_copy(update={"concurrency": part})})
