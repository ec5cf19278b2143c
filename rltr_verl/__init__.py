"""Reinforcement learning of LLM agents on data without ground truth, as a plugin package for verl.

Importing this package is cheap: torch and verl are not loaded. The public names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Trajectory": "rltr_verl.trajectory",
    "Turn": "rltr_verl.trajectory",
    "ToolCall": "rltr_verl.trajectory",
    "Observation": "rltr_verl.trajectory",
    "Status": "rltr_verl.trajectory",
    "parse_turn": "rltr_verl.parsing",
    "parse_verdict": "rltr_verl.judge.verdict",
    "RewardTerm": "rltr_verl.reward",
    "TermResult": "rltr_verl.reward",
    "tool": "rltr_verl.tooling",
}

if TYPE_CHECKING:
    from rltr_verl.judge.verdict import parse_verdict
    from rltr_verl.parsing import parse_turn
    from rltr_verl.reward import RewardTerm, TermResult
    from rltr_verl.tooling import tool
    from rltr_verl.trajectory import Observation, Status, ToolCall, Trajectory, Turn

__all__ = [
    "Observation",
    "RewardTerm",
    "Status",
    "TermResult",
    "ToolCall",
    "Trajectory",
    "Turn",
    "parse_turn",
    "parse_verdict",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rltr_verl' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
