"""The completeness checker (RLTR 3.2): is the sequence of tool calls complete for the query?

A :class:`Checker` gives votes. Backends: ``checklist`` compares a row's needs with the successful calls; ``endpoint``
asks a language model behind OpenAI-compatible servers; ``hosted`` asks the one that verl serves itself. A checker that
cannot tell raises :class:`rltr_verl.errors.Unscored`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rltr_verl.config import JudgeSettings
from rltr_verl.judge.base import Checker, Vote, Votes
from rltr_verl.judge.checklist import ChecklistChecker

if TYPE_CHECKING:
    from rltr_verl.judge.endpoint import Hosted

__all__ = ["Checker", "ChecklistChecker", "Vote", "Votes", "build_checker"]


def build_checker(settings: JudgeSettings, *, hosted: Hosted | None = None) -> Checker:
    """The checker that ``rltr.judge`` describes. Opens no connection.

    Args:
        hosted: the judge that verl serves, for the backend of that name.

    Raises:
        ConfigError: the settings name a key variable that is not set, a folder that cannot hold the cache, a budget
            without prices, or the backend ``hosted`` while verl serves no judge.
        DiskError: the cache's folder cannot be made or written to.
    """
    if settings.backend == "checklist":
        return ChecklistChecker(settings.credit)
    from rltr_verl.judge.budget import build_budget
    from rltr_verl.judge.cache import build_cache
    from rltr_verl.judge.endpoint import EndpointChecker, hosted_settings

    if settings.backend == "hosted":
        settings = hosted_settings(settings, hosted)
    return EndpointChecker(settings, cache=build_cache(settings.cache), budget=build_budget(settings))
