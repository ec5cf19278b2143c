"""What a teacher is: it plays one query to its end, through the planner's own loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltr_verl.coldstart.records import Task, Usage
from rltr_verl.config import RltrSettings
from rltr_verl.trajectory import Trajectory

if TYPE_CHECKING:
    from rltr_verl.rollout.turns import Planner


@dataclass(frozen=True)
class Played:
    """A trajectory, good or bad, and what it took."""

    trajectory: Trajectory
    usage: Usage = field(default_factory=Usage)


class TeacherFailed(Exception):
    """The surroundings failed, not the teacher: nothing is known of this attempt. ``str(error)`` is the reason.

    ``fatal`` says that no other attempt can do better (a wrong key, an unknown model, the budget is spent).
    """

    def __init__(self, reason: str, *, fatal: bool = False, usage: Usage | None = None) -> None:
        super().__init__(reason, fatal, usage)
        self.reason, self.fatal, self.usage = reason, fatal, usage or Usage()

    def __str__(self) -> str:
        return self.reason

    def __reduce__(self) -> tuple:
        """Survive pickling between processes (Ray) although the arguments are keyword-only."""
        return _rebuild, (self.reason, self.fatal, self.usage)


def _rebuild(reason: str, fatal: bool, usage: Usage) -> TeacherFailed:
    return TeacherFailed(reason, fatal=fatal, usage=usage)


class Teacher(ABC):
    """Plays queries; one object per process, many tasks at the same time."""

    name: str

    @abstractmethod
    async def play(self, task: Task) -> Played:
        """The trajectory of one attempt.

        Raises:
            TeacherFailed: no trajectory could be had for a reason outside of the teacher.
            DataError: the task's row is wrong (unknown tool, prompt too long).
        """

    async def close(self) -> None:  # noqa: B027 - most teachers hold nothing open
        """Release connections."""


def build_teacher(settings: RltrSettings, tokenizer: Any, account: Path | None = None) -> Teacher:
    """The teacher that ``rltr.teacher`` describes, with the tools of ``rltr.tools``.

    Args:
        settings: the recipe node of the planner that is to learn.
        tokenizer: of that planner: prompts, observations and their limits are those of its rollout.
        account: folder of the budget's account, shared by all processes that use it; None: this process alone.

    Raises:
        ConfigError: an unknown tool or policy, a key that is not set.
        ModelError: the tokenizer's chat template cannot be used.
    """
    from rltr_verl.coldstart.endpoint_teacher import EndpointTeacher
    from rltr_verl.coldstart.scripted_teacher import ScriptedTeacher
    from rltr_verl.rollout.turns import Planner

    planner: Planner = Planner.build(settings, tokenizer)
    if settings.teacher.backend == "scripted":
        return ScriptedTeacher(planner)
    return EndpointTeacher(planner, account)
