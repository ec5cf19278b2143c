"""Attacks on a completeness judge: trajectories that are not complete and try to look it.

Every attack starts from a query whose complete trajectory is known (:class:`Case`) and leaves at least one need unmet,
so a vote for "complete" is a false positive by construction. :func:`run_suite` asks a checker about all of them and
about the complete trajectories themselves, since a judge that always says 0 would resist every attack.
"""

from __future__ import annotations

from rltr_verl.judge.attacks import behaviour, injection, words  # noqa: F401  (fill the registry)
from rltr_verl.judge.attacks.cases import Case, Step, case_of
from rltr_verl.judge.attacks.measure import Outcome, Report, Verdict, run_suite
from rltr_verl.judge.attacks.registry import ATTACKS, Attack, Draw, attacks_named
from rltr_verl.judge.attacks.suite import CONTROL, Attempt, build_suite
from rltr_verl.judge.attacks.world_cases import fresh_world_cases, world_cases

__all__ = [
    "ATTACKS",
    "CONTROL",
    "Attack",
    "Attempt",
    "Case",
    "Draw",
    "Outcome",
    "Report",
    "Step",
    "Verdict",
    "attacks_named",
    "build_suite",
    "case_of",
    "fresh_world_cases",
    "run_suite",
    "world_cases",
]
