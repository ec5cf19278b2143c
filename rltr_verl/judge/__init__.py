"""The completeness checker (RLTR 3.2): is the sequence of tool calls complete for the query?

A :class:`Checker` gives votes. Backends: ``checklist`` compares a row's needs with the successful calls; ``endpoint``
asks a language model behind an OpenAI-compatible server. A checker that cannot tell raises
:class:`rltr_verl.errors.Unscored`.
"""

from __future__ import annotations

from rltr_verl.config import JudgeSettings
from rltr_verl.judge.base import Checker, Vote, Votes
from rltr_verl.judge.checklist import ChecklistChecker

__all__ = ["Checker", "ChecklistChecker", "Vote", "Votes", "build_checker"]


def build_checker(settings: JudgeSettings) -> Checker:
    """The checker that ``rltr.judge`` describes. Opens no connection.

    Raises :class:`rltr_verl.errors.ConfigError` if the settings name a key variable that is not set.
    """
    if settings.backend == "checklist":
        return ChecklistChecker(settings.credit)
    from rltr_verl.judge.endpoint import EndpointChecker

    return EndpointChecker(settings)
