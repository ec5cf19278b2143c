"""Unscored trajectories: how the trainer hears of them, and when they stop it.

A trajectory is scored in one process (a reward worker), and missed in another (the trainer's replay buffer), which sees
only that a session left no row. A small Ray actor, the :class:`Ledger`, carries the reason from one to the other. It is
spoken to about unscored trajectories only; a scored one costs no call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ray

from rltr_verl.config import JudgeSettings, load_settings
from rltr_verl.errors import JudgeOutage, RolloutError

_LOG = logging.getLogger(__name__)
_NAME = "rltr_unscored"


class Missing(NamedTuple):
    """Why a trajectory has no score: the judge's failure, or the recipe leaves out what was cut off."""

    reason: str
    by_judge: bool = True


class Ledger:
    """Reasons of unscored trajectories, until they are asked for."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, int], Missing] = {}

    def add(self, uid: str, session: int, missing: Missing) -> None:
        """Note why session ``session`` of prompt ``uid`` has no score."""
        self._reasons[uid, session] = missing

    def take(self, uids: Iterable[str]) -> list[Missing]:
        """The reasons noted for these prompts, one a session, oldest first; they are forgotten here."""
        wanted = set(uids)
        taken = [key for key in self._reasons if key[0] in wanted]
        return [self._reasons.pop(key) for key in taken]


class RemoteLedger:
    """The run's one :class:`Ledger`, as the trainer holds it: the actor ends with the process that opened it."""

    def __init__(self) -> None:
        actor = ray.remote(num_cpus=0)(Ledger)
        self._actor: Any = actor.options(name=_NAME, get_if_exists=True).remote()

    def take(self, uids: Iterable[str]) -> list[Missing]:
        """See :meth:`Ledger.take`."""
        return ray.get(self._actor.take.remote(list(uids)))


async def report(uid: str, session: int, missing: Missing) -> None:
    """Tell the trainer why a trajectory has no score, and wait until it is noted.

    Outside of a run, or under a replay buffer that is not ours, there is nobody to tell: then nothing happens.
    """
    if not ray.is_initialized():
        return
    try:
        await ray.get_actor(_NAME).add.remote(uid, session, missing)
    except ValueError:
        _LOG.warning("no replay buffer of rltr_verl listens; rltr.judge.max_unscored_share is not watched.")
    except ray.exceptions.RayError as error:
        _LOG.warning("an unscored trajectory could not be reported: %s", error)


@dataclass
class Tally:
    """What came of the trajectories of a step that were to be scored; sessions that failed before do not count.

    Attributes:
        scored: trajectories with a score, malformed ones too.
        reasons: why the judge left the others without one, oldest first.
        cut: those that the recipe leaves out because they were cut off; they say nothing about the judge.
        lone_groups: groups left out because one trajectory remained.
    """

    scored: int = 0
    reasons: list[str] = field(default_factory=list)
    cut: int = 0
    lone_groups: int = 0

    def add(self, missing: Iterable[Missing]) -> None:
        """Count trajectories without a score."""
        found = list(missing)
        self.reasons += [item.reason for item in found if item.by_judge]
        self.cut += sum(not item.by_judge for item in found)

    @property
    def unscored(self) -> int:
        """Trajectories that the judge left without a score."""
        return len(self.reasons)

    @property
    def ended(self) -> int:
        """All trajectories that were scored or left to the judge."""
        return self.scored + self.unscored

    @property
    def share(self) -> float:
        """Unscored over all that were to be scored; 0 if there were none."""
        return self.unscored / self.ended if self.ended else 0.0

    def metrics(self) -> dict[str, float]:
        """What a step logs; the same keys whether or not anything is unscored."""
        counts = {"unscored": self.unscored, "unscored_share": self.share, "left_out_truncated": self.cut}
        counts["lone_groups"] = self.lone_groups
        return {f"training/{name}": float(value) for name, value in counts.items()}


@dataclass(frozen=True)
class Watch:
    """Compares a tally with ``rltr.judge.max_unscored_share``.

    Attributes:
        limit: the share that may be unscored.
        judge: what the judge is, for the message.
    """

    limit: float = 1.0
    judge: str = "judge"

    def over(self, tally: Tally) -> bool:
        """Whether more than the allowed share is unscored."""
        return tally.share > self.limit

    def nothing_left(self, tally: Tally, what: str) -> JudgeOutage | RolloutError:
        """The error where no trajectory of ``what`` has a score."""
        if tally.reasons:
            return self.outage(tally, what, nothing_left=True)
        problem = (
            f"nothing is left of it: all {tally.cut} trajectories were cut off, and rltr.reward.truncated=unscored"
        )
        fix = "raise data.max_response_length or rltr.rollout.max_turns, or set rltr.reward.truncated=invalid."
        return RolloutError(problem, where=what, fix=fix)

    def outage(self, tally: Tally, what: str, nothing_left: bool = False) -> JudgeOutage:
        """The error that stops training. ``what`` says whose trajectories they are, e.g. ``step 3``."""
        last = tally.reasons[-1]
        times, why = tally.reasons.count(last), last.partition(" Fix: ")[0]  # the message has a fix of its own
        consequence = "nothing is left of it" if nothing_left else "over rltr.judge.max_unscored_share"
        problem = (
            f"{tally.unscored} of {tally.ended} trajectories of {what} are unscored ({tally.share:.0%}, limit "
            f"{self.limit:.0%}): {consequence}. Last reason ({times} of {tally.unscored} times): {why}"
        )
        fix = "bring the judge back and start the same command again; it resumes from the last checkpoint."
        return JudgeOutage(problem, where=self.judge, fix=fix)


def build_watch(config: Any) -> Watch:
    """The watch that the run's whole configuration asks for; without a node ``rltr`` there is no limit."""
    from omegaconf import OmegaConf

    node: Any = OmegaConf.select(config, "rltr")
    if node is None:
        return Watch()
    settings = load_settings(OmegaConf.to_container(node, resolve=True)).judge  # type: ignore[arg-type]
    return Watch(settings.max_unscored_share, _describe(settings, config))


def _describe(settings: JudgeSettings, config: Any) -> str:
    """The judge as a user would name it: its URLs and model, the model that verl serves, or the rows' needs."""
    from omegaconf import OmegaConf

    if settings.backend == "endpoint":
        return f"judge {', '.join(settings.base_urls)} (model {settings.model})"
    if settings.backend == "hosted":
        return f"judge served by verl ({OmegaConf.select(config, 'reward.reward_model.model_path')})"
    return "judge checklist (the rows' needs)"
