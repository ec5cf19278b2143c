"""Validation metrics over what was scored.

verl knows how many sessions a validation pass started, and counts one that left no score as ``acc = 0``: after an
outage of the judge the planner would look worse than it is. Here such sessions leave every mean, and their share is
reported as ``unscored``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MARK = "unscored"
"""Metric by which rows of the reward manager ``rltr`` are known; other rows are left to verl."""

Metrics = dict[str, dict[str, dict[str, float]]]


def process_validation_metrics(
    data_sources: list[str],
    sample_uids: list[str],
    infos_dict: dict[str, list[Any]],
    seed: int = 42,
    expected_acc_counts: dict[tuple[str, str], int] | None = None,
) -> Metrics:
    """verl's metrics ``{data source: {variable: {name: value}}}``, sessions without a score left out.

    With N the sessions started per prompt, ``mean@N`` of a variable is its sum over the scored rows of a data source,
    over their number; verl would give a ``mean@k`` for the prompts of which k rows are there. ``unscored`` is the share
    of sessions without a score. ``best@k`` and the like are verl's, over the prompts with k scored rows. Rows of a
    reward manager other than ``rltr`` are handed to verl unchanged.
    """
    from verl.trainer.ppo.metric_utils import process_validation_metrics as verls

    if MARK not in infos_dict or not expected_acc_counts:
        return verls(data_sources, sample_uids, infos_dict, seed, expected_acc_counts)
    infos = {name: values for name, values in infos_dict.items() if name != MARK}
    metrics = verls(data_sources, sample_uids, infos, seed)  # no expected counts: nothing is filled up with zeros
    for source, counts in _by_source(expected_acc_counts).items():
        rows = [row for row, name in enumerate(data_sources) if name == source]
        mean = f"mean@{max(counts)}"
        for variable, found in metrics[source].items():
            _merge_means(found, mean, [infos[variable][row] for row in rows])
        metrics[source][MARK] = {mean: 1 - len(rows) / sum(counts)}
    return metrics


def _by_source(expected: Mapping[tuple[str, str], int]) -> dict[str, list[int]]:
    """Sessions started per prompt, for each data source."""
    sources: dict[str, list[int]] = {}
    for (source, _), count in expected.items():
        sources.setdefault(source, []).append(count)
    return sources


def _merge_means(metrics: dict[str, float], name: str, values: Sequence[float | None]) -> None:
    """Put one mean over all ``values`` in place of those over the prompts with k rows each."""
    known = [float(value) for value in values if value is not None]
    for key in [key for key in metrics if key.startswith("mean@")]:
        del metrics[key]
    metrics[name] = sum(known) / len(known)
