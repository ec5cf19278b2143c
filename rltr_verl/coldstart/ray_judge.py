"""Judges in the processes of a Ray cluster, used like one checker. The driver alone writes verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rltr_verl.coldstart.actors import Actors, ActorsFailed, share
from rltr_verl.config import JudgeSettings
from rltr_verl.errors import DataError, RltrError, Unscored
from rltr_verl.judge import Checker, Votes, build_checker
from rltr_verl.trajectory import Trajectory


class _Judges:
    """A checker in a worker's process."""

    def __init__(self, checker: Checker) -> None:
        self._checker = checker

    async def handle(self, item: tuple[Trajectory, dict[str, Any]]) -> Votes | RltrError:
        """The votes, or why there are none."""
        try:
            return await self._checker.check(*item)
        except (Unscored, DataError) as error:
            return error

    async def close(self) -> None:
        """Close the checker."""
        await self._checker.close()


@dataclass(frozen=True)
class _Opens:
    """Builds the checker of a worker, with its node's part of the requests in flight."""

    settings: JudgeSettings

    def __call__(self, nodes: int) -> _Judges:
        part = share(self.settings.concurrency, nodes)
        return _Judges(build_checker(self.settings.model_copy(update={"concurrency": part})))


class RayChecker(Checker):
    """The pool; belongs to one event loop.

    A judgement that was under way in a worker that died is asked for again in another one; one under which several
    died is unscored.

    Args:
        address, workers: see :class:`rltr_verl.coldstart.actors.Actors`.
        settings: of the whole pool.

    Raises:
        ConfigError: there is no such cluster, or it has fewer CPUs than ``workers``.
    """

    def __init__(self, address: str, workers: int, settings: JudgeSettings) -> None:
        self._actors = Actors(address, workers, _Opens(settings), settings.concurrency)

    async def check(self, trajectory: Trajectory, row: Mapping[str, Any]) -> Votes:
        """See :class:`Checker`."""
        try:
            found = await self._actors.submit((trajectory, dict(row)))
        except ActorsFailed as error:
            fix = "look into Ray's logs (/tmp/ray/session_latest/logs)."
            raise Unscored(error.reason, where="--ray", fix=fix) from None
        if isinstance(found, Votes):
            return found
        raise found

    async def close(self) -> None:
        """End the workers."""
        await self._actors.close()
