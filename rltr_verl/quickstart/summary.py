"""``summary.json``: the figures of a run."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rltr_verl.quickstart.curves import Curves
from rltr_verl.quickstart.options import Options
from rltr_verl.quickstart.state import RunState

PACKAGES = ("rltr_verl", "verl", "torch", "transformers", "ray")


def summary(options: Options, state: RunState, curves: Curves) -> dict[str, Any]:
    """Figures before and after RL, on queries of the training facts (``val``) and on unseen facts (``val_unseen``).

    ``minutes`` is the wall time of all stages and attempts, without the installation. ``step_seconds`` is the median
    RL step. ``kinds`` holds the figures per kind of query.
    """
    before, after = state.result("before"), state.result("after")
    seconds = state.seconds
    return {
        "algo": options.algo,
        "seed": options.seed,
        "completeness_before": before["val"]["completeness"],
        "completeness_after": after["val"]["completeness"],
        "completeness_unseen_before": before["val_unseen"]["completeness"],
        "completeness_unseen_after": after["val_unseen"]["completeness"],
        "calls_before": before["val"]["calls"],
        "calls_after": after["val"]["calls"],
        "calls_unseen_before": before["val_unseen"]["calls"],
        "calls_unseen_after": after["val_unseen"]["calls"],
        "format_ok_before": before["val"]["format_ok"],
        "format_ok_after": after["val"]["format_ok"],
        "minutes": sum(seconds.values()) / 60,
        "step_seconds": step_seconds(curves),
        "stage_seconds": seconds,
        "interruptions": state.interruptions,
        "sft_steps": state.result("gate")["steps"],
        "rl_steps": state.result("rl")["steps"],
        "gate": {key: state.result("gate")[key] for key in ("format_ok", "multi_call", "n_prompts")},
        "kinds": kinds(before["val"], after["val"]),
        "kinds_unseen": kinds(before["val_unseen"], after["val_unseen"]),
        "overrides": list(options.overrides),
        "versions": versions(),
    }


def kinds(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Figures per kind of one split, before beside after."""
    return {
        kind: {
            "n": old["n"],
            "completeness_before": old["completeness"],
            "completeness_after": after["kinds"][kind]["completeness"],
            "calls_before": old["calls"],
            "calls_after": after["kinds"][kind]["calls"],
        }
        for kind, old in before["kinds"].items()
    }


def step_seconds(curves: Curves) -> float | None:
    """Median seconds of an RL step; None if verl logged none."""
    found = [values["timing_s/step"] for values in curves.values() if "timing_s/step" in values]
    return statistics.median(found) if found else None


def versions() -> dict[str, str]:
    """Python and the packages a figure depends on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def write_summary(path: Path, values: Mapping[str, Any]) -> None:
    """Readable JSON."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
