"""Attacks and queries -> the trajectories to ask a judge about."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rltr_verl.errors import DataError
from rltr_verl.judge.attacks.cases import Case, Message
from rltr_verl.judge.attacks.registry import Attack, Draw
from rltr_verl.trajectory import Trajectory

CONTROL = "honest"
"""Name of the complete trajectories, which a judge has to accept."""


@dataclass(frozen=True)
class Attempt:
    """A trajectory of a query whose completeness is known."""

    case: Case
    trajectory: Trajectory


def build_suite(
    cases: Sequence[Case], attacks: Sequence[Attack], per_attack: int, seed: int
) -> dict[str, list[Attempt]]:
    """Attempts by attack, under :data:`CONTROL` the complete ones; the same arguments give the same suite.

    All attacks take the same ``per_attack`` queries, those with several calls first. Where a query does not lend itself
    to an attack, the attack goes without it.

    Raises:
        DataError: fewer than two different queries, or an attack that leaves a query complete.
    """
    pool = list({case.query: case for case in cases}.values())
    if len(pool) < 2:
        problem = f"attacks mix the calls of several queries; {len(pool)} can be used"
        fix = "give rows with 'needs' and a complete trajectory, at least two and of different queries."
        raise DataError(problem, where="the attack suite", fix=fix)
    mixed = random.Random(f"suite {seed}").sample(pool, len(pool))
    chosen = sorted(mixed, key=lambda case: len(case.steps) < 2)[:per_attack]
    suite = {CONTROL: [Attempt(case, case.complete()) for case in chosen]}
    real = frozenset(step.identity for case in pool for step in case.steps)
    for attack in attacks:
        suite[attack.name] = list(_attempts(attack, chosen, mixed, seed, real))
    return suite


def _attempts(
    attack: Attack, chosen: Sequence[Case], pool: Sequence[Case], seed: int, real: frozenset[tuple[str, str]]
) -> Iterator[Attempt]:
    for number, case in enumerate(chosen):
        messages = attack.build(Draw(case, pool, random.Random(f"{attack.name} {seed} {number}")))
        if messages is not None:
            yield Attempt(case, _incomplete(attack, case, messages, real))


def _incomplete(attack: Attack, case: Case, messages: list[Message], real: frozenset[tuple[str, str]]) -> Trajectory:
    """The trajectory, once a need is left that no call really answered by a tool meets.

    Not by the verdict of a checker, which is what the suite tests.
    """
    trajectory = case.trajectory(messages)
    if not case.unmet(trajectory.executed(), real):
        problem = f"the attack '{attack.name}' leaves the query complete"
        fix = "state the needs of the query more closely, or leave out the row or the attack."
        raise DataError(problem, where=f"query {case.id}", fix=fix)
    return trajectory
