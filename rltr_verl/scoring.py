"""Trajectory -> reward terms -> total, without verl (RLTR Eq. 3).

Total = ``format_invalid`` (-1) if the format is invalid; then no term runs, so no checker is asked. Else the sum of
weight times value over the recipe's terms, by default R_comp + R_repeat + R_error, not below ``floor``. A trajectory
for which a term raises :class:`Unscored` has no total; nor, if the recipe says so, has one that was cut off.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from rltr_verl._binding import bind_settings
from rltr_verl.config import RewardSettings, RltrSettings
from rltr_verl.errors import ConfigError, ToolDefinitionError, Unscored
from rltr_verl.format_check import REASONS, format_faults, only_truncated
from rltr_verl.judge import Checker, build_checker
from rltr_verl.reward import RewardTerm, TermResult
from rltr_verl.tooling import load_file
from rltr_verl.trajectory import Trajectory, is_tool_fault

_TERMS = "rltr.reward.terms"
_SHIPPED = "rltr_verl.reward_fns"
_COUNTS = ("calls", "turns", "tool_faults")
_FLAGS = ("format_ok", *(f"format_{reason}" for reason in REASONS), "unscored")


@dataclass(frozen=True)
class WeightedTerm:
    """A term of the recipe with its weight in the total."""

    name: str
    term: RewardTerm
    weight: float = 1.0


@dataclass(frozen=True)
class ScoredTrajectory:
    """The score of one trajectory.

    ``total`` is None when unscored, with the reason in ``unscored``. ``results`` holds what each term found (none for a
    malformed trajectory). ``metrics`` are floats under the scorer's fixed keys; without a verdict, the metrics that
    depend on it are NaN.
    """

    total: float | None
    faults: tuple[str, ...]
    metrics: dict[str, float]
    results: dict[str, TermResult] = field(default_factory=dict)
    unscored: str | None = None

    def record(self) -> dict[str, Any]:
        """Plain JSON values for the per-trajectory dump."""
        terms = {name: {"value": result.value + 0.0, **result.record} for name, result in self.results.items()}
        shown = {key: value for key, value in self.metrics.items() if key not in _FLAGS}
        metrics = {key: value if math.isfinite(value) else None for key, value in shown.items()}
        faults = list(self.faults)
        return {"total": self.total, "unscored": self.unscored, "format": faults, "terms": terms, "metrics": metrics}


class Scorer:
    """Scores trajectories as a recipe says.

    Args:
        settings: the recipe node ``rltr``.
        checker: stands in for the one that ``rltr.judge`` describes.

    Raises:
        ConfigError: an unknown term or setting, or two terms that report one metric.
        ToolDefinitionError: a file of a term that does not define exactly one.
    """

    def __init__(self, settings: RltrSettings, checker: Checker | None = None) -> None:
        self._settings = settings
        self._checker = checker or build_checker(settings.judge)
        self.terms = load_terms(settings.reward, self._checker)
        self.metric_keys = _metric_keys(self.terms)

    async def score(self, trajectory: Trajectory, row: Mapping[str, Any]) -> ScoredTrajectory:
        """Total and metrics of ``trajectory``; ``row`` is the query's data as the terms need it (``needs``, ...)."""
        settings = self._settings
        faults = format_faults(trajectory, settings.rollout.mode, settings.reward.require_stop_marker)
        metrics = dict.fromkeys(self.metric_keys, 0.0) | _counts(trajectory, faults)
        for item in self.terms:
            metrics |= _floats(item.term.measure(trajectory))
        if faults and settings.reward.truncated == "unscored" and only_truncated(trajectory, faults):
            return self._left_out(trajectory, faults, metrics)
        if faults:
            return ScoredTrajectory(settings.reward.format_invalid, faults, metrics)
        results, missing = await self._run_terms(trajectory, row)
        return self._combine(metrics, results, missing)

    async def close(self) -> None:
        """Release the checker's connections."""
        await self._checker.close()

    def _left_out(self, trajectory: Trajectory, faults: tuple[str, ...], metrics: dict[str, float]) -> ScoredTrajectory:
        """A trajectory that was cut off, where the recipe says that nothing follows from it."""
        for item in self.terms:
            unknown = {item.name, *item.term.metric_keys} - set(item.term.measure(trajectory))
            metrics |= dict.fromkeys(unknown, math.nan)
        reason = f"truncated ({trajectory.end}); rltr.reward.truncated=unscored"
        return ScoredTrajectory(None, faults, metrics | {"unscored": 1.0}, unscored=reason)

    async def _run_terms(
        self, trajectory: Trajectory, row: Mapping[str, Any]
    ) -> tuple[dict[str, TermResult], dict[str, Unscored]]:
        results: dict[str, TermResult] = {}
        missing: dict[str, Unscored] = {}
        for item in self.terms:
            try:
                result = await item.term.score(trajectory, row)
            except Unscored as error:
                missing[item.name] = error
                continue
            _check_result(item, result)
            results[item.name] = result
        return results, missing

    def _combine(
        self, metrics: dict[str, float], results: dict[str, TermResult], missing: Mapping[str, Unscored]
    ) -> ScoredTrajectory:
        for item in self.terms:
            if item.name in results:
                metrics[item.name] = item.weight * results[item.name].value + 0.0  # never -0.0
                metrics |= _floats(results[item.name].metrics)
            else:
                metrics |= dict.fromkeys((item.name, *item.term.metric_keys), math.nan)
        if missing:
            reason = "; ".join(f"{name}: {error}" for name, error in missing.items())
            return ScoredTrajectory(None, (), metrics | {"unscored": 1.0}, results, reason)
        total = sum(metrics[item.name] for item in self.terms)
        floor = self._settings.reward.floor
        return ScoredTrajectory(total if floor is None else max(total, floor), (), metrics, results)


def load_terms(settings: RewardSettings, checker: Checker) -> list[WeightedTerm]:
    """The recipe's reward terms in order, with their settings bound and ``checker`` given to those that ask for it."""
    return [_load_term(name, dict(options), checker) for name, options in settings.active_terms.items()]


def shipped_terms() -> list[str]:
    """Names of the terms that come with the package: one file each in ``reward_fns/``."""
    package = importlib.import_module(_SHIPPED)
    files = (path for folder in package.__path__ for path in Path(folder).glob("*.py"))
    return sorted(path.stem for path in files if not path.stem.startswith("_"))


def _load_term(name: str, options: dict[str, Any], checker: Checker) -> WeightedTerm:
    where = f"{_TERMS}.{name}"
    weight = options.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
        raise ConfigError(f"the weight must be a number (given: {weight!r})", where=f"{where}.weight", fix="e.g. 1.0.")
    path = options.pop("path", None)
    module = _shipped_module(name) if path is None else load_file(str(path), f"{where}.path")
    cls = _term_class(module)
    return WeightedTerm(name, cls(**bind_settings(cls, options, where, {"checker": checker})), float(weight))


def _shipped_module(name: str) -> ModuleType:
    known = shipped_terms()
    if name in known:
        return importlib.import_module(f"{_SHIPPED}.{name}")
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"shipped: {', '.join(known)}."
    fix = f"{hint} For a term of your own give {_TERMS}.{name}.path=my_term.py."
    raise ConfigError(f"unknown reward term '{name}'", where=_TERMS, fix=fix)


def _term_class(module: ModuleType) -> type[RewardTerm]:
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, RewardTerm) and value.__module__ == module.__name__
    ]
    concrete = [cls for cls in found if not inspect.isabstract(cls)]
    if len(concrete) == 1:
        return concrete[0]
    problem = f"defines {len(concrete)} reward terms, not one"
    if found and not concrete:
        problem = f"class {found[0].__name__} does not implement {', '.join(sorted(found[0].__abstractmethods__))}"
    fix = "define exactly one subclass of rltr_verl.RewardTerm with an async method score."
    raise ToolDefinitionError(problem, where=str(module.__file__), fix=fix)


def _metric_keys(terms: list[WeightedTerm]) -> tuple[str, ...]:
    keys = [*(key for item in terms for key in (item.name, *item.term.metric_keys)), *_COUNTS, *_FLAGS]
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        fix = "rename the term or change its metric_keys."
        raise ConfigError(f"the metric '{twice[0]}' is reported twice", where=_TERMS, fix=fix)
    return tuple(keys)


def _counts(trajectory: Trajectory, faults: tuple[str, ...]) -> dict[str, float]:
    tool_faults = sum(is_tool_fault(item.observation) for item in trajectory.executed())
    counts = {"calls": trajectory.n_calls, "turns": len(trajectory.turns), "tool_faults": tool_faults}
    return _floats({**counts, "format_ok": not faults, **{f"format_{reason}": True for reason in faults}})


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items()}


def _check_result(item: WeightedTerm, result: TermResult) -> None:
    """Hold a term to its contract; a breach would otherwise surface as a crash inside verl, or as a NaN loss."""
    where = f"{_TERMS}.{item.name}"
    if not isinstance(result, TermResult) or not math.isfinite(result.value):
        fix = "return TermResult(value=<finite number>), or raise Unscored."
        raise ToolDefinitionError(f"score() returned {result!r}", where=where, fix=fix)
    if set(result.metrics) != set(item.term.metric_keys):
        problem = f"score() reported metrics {sorted(result.metrics)}, metric_keys are {sorted(item.term.metric_keys)}"
        raise ToolDefinitionError(problem, where=where, fix="report the same keys on every path.")
