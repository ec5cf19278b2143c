"""Is a trajectory well formed? (RLTR 3.3: an invalid format gives -1 and the checker is never called.)

The paper does not define the rule; this is ours, each breach with a name that becomes a metric. A call that cannot be
read inside an otherwise well-formed trajectory is no breach: R_error charges it, so that mu matters.
"""

from __future__ import annotations

from typing import Literal

from rltr_verl.parsing import STOP_MARKER
from rltr_verl.trajectory import CUT_ENDS, Trajectory, Turn

Mode = Literal["planner", "end_to_end"]

REASONS = (
    "unbalanced_think",
    "nested_think",
    "unbalanced_answer",
    "forged_role",
    "forged_tool_response",
    "two_answers",
    "text_after_answer",
    "call_in_answer",
    "call_and_answer",
    "empty_turn",
    "text_after_stop",
    "no_stop_marker",
    "truncated",
    "no_turn",
)
"""Every name :func:`format_faults` can return, in a fixed order."""

_LEFT_OPEN = {"unbalanced_think", "empty_turn"}


def format_faults(trajectory: Trajectory, mode: Mode = "planner", require_stop_marker: bool = True) -> tuple[str, ...]:
    """Names of all breaches of the format, in the order of :data:`REASONS`; empty for a well-formed trajectory.

    A planner must end with the stop marker and write nothing after it; end to end, the answer stands after the marker.
    ``turn_limit``, ``length`` and ``aborted`` endings count as ``truncated``.
    """
    found = {fault for turn in trajectory.turns for fault in turn.faults}
    if not trajectory.turns:
        found.add("no_turn")
    else:
        found |= _ending(trajectory, trajectory.turns[-1], mode, require_stop_marker)
    return tuple(reason for reason in REASONS if reason in found)


def only_truncated(trajectory: Trajectory, faults: tuple[str, ...]) -> bool:
    """Whether a malformed trajectory has no breach but that it was cut off, and what the cut itself left open."""
    if "truncated" not in faults:
        return False
    earlier = {fault for turn in trajectory.turns[:-1] for fault in turn.faults}
    excused = {"truncated"} | (_LEFT_OPEN if trajectory.end in CUT_ENDS else set())
    return not earlier and set(faults) <= excused


def _ending(trajectory: Trajectory, last: Turn, mode: Mode, require_stop_marker: bool) -> set[str]:
    found = set()
    if trajectory.end in ("turn_limit", "length", "aborted"):
        found.add("truncated")
    elif not last.stopped and (require_stop_marker or last.answer is None):
        found.add("no_stop_marker")
    if last.stopped and mode == "planner" and (last.answer or _thinks_on(last)):
        found.add("text_after_stop")
    if last.stopped and mode == "end_to_end" and not last.answer:
        found.add("empty_turn")
    if any(turn.stopped for turn in trajectory.turns[:-1]):
        found.add("two_answers")
    return found


def _thinks_on(last: Turn) -> bool:
    """Whether a thought stands behind the marker that ended the turn. A draft of the marker is before one or inside."""
    return "</think>" in last.text.rpartition(STOP_MARKER)[2]
