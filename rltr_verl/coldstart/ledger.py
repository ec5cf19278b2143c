"""The ledger: one line a candidate, with its figures and the reason it was kept or dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rltr_verl.coldstart.records import Outcome, Sample
from rltr_verl.config import RltrSettings
from rltr_verl.format_check import format_faults
from rltr_verl.trajectory import POLICY_ERRORS, is_tool_fault

NOT_GIVEN = "not given"
"""The difficulty of rows that name none."""


class Reason(str, Enum):
    """Why a candidate was dropped, in the order of the rules; the last one says why it was kept.

    The first four are outcomes of sampling. ``unscored``: the judge failed, which says nothing about the candidate; a
    later run has it judged again.
    """

    EMPTY = "empty"
    REFUSAL = "refusal"
    DUPLICATE = "duplicate"
    FAILED = "failed"
    MALFORMED = "malformed"
    POLICY_ERROR = "policy_error"
    TOOL_FAULT = "tool_fault"
    CONTAMINATED = "contaminated"
    UNSCORED = "unscored"
    BELOW_THRESHOLD = "below_threshold"
    NOT_BEST = "not_best"
    BALANCE = "balance"
    BEST = "best"


@dataclass(slots=True)
class Candidate:
    """What selection remembers of a sample: figures, and never its text.

    Attributes:
        difficulty: the row's, as text.
        format: breaches of the format, see :mod:`rltr_verl.format_check`.
        policy_errors: how often each of the policy's own mistakes occurs.
        tool_faults: calls whose tool failed.
        length: characters that the teacher wrote, over all turns.
        votes: of the judge; None is a vote without a readable verdict.
        score: mean of the readable votes; None where nobody judged.
        reason: None as long as no rule has decided.
        detail: what the rule saw.
        offset: where the sample's line begins in its file, in bytes.
        verdict_key: names what the verdict depends on; None where no judge is asked.
    """

    id: str
    query_id: str
    number: int
    outcome: Outcome
    difficulty: str = NOT_GIVEN
    format: tuple[str, ...] = ()
    policy_errors: Mapping[str, int] = field(default_factory=dict)
    tool_faults: int = 0
    n_calls: int = 0
    length: int = 0
    votes: tuple[float | None, ...] = ()
    score: float | None = None
    reason: Reason | None = None
    detail: str | None = None
    offset: int = 0
    verdict_key: str | None = None

    @property
    def kept(self) -> bool:
        """Whether it is in the selection."""
        return self.reason is Reason.BEST

    def settle(self, reason: Reason, detail: str | None = None) -> None:
        """Note what a rule decided."""
        self.reason, self.detail = reason, detail

    def to_dict(self) -> dict[str, Any]:
        """The line of ``ledger.jsonl``."""
        return {
            "id": self.id,
            "query_id": self.query_id,
            "number": self.number,
            "outcome": self.outcome.value,
            "format": list(self.format),
            "policy_errors": dict(self.policy_errors),
            "tool_faults": self.tool_faults,
            "n_calls": self.n_calls,
            "length": self.length,
            "votes": list(self.votes),
            "score": self.score,
            "difficulty": self.difficulty,
            "kept": self.kept,
            "reason": self.reason.value if self.reason else None,
            "detail": self.detail,
        }


def candidate_of(sample: Sample, offset: int, settings: RltrSettings) -> Candidate:
    """The figures of a sample; no rule has decided yet."""
    task, played = sample.task, sample.trajectory
    candidate = Candidate(sample.id, task.query_id, task.number, sample.outcome, offset=offset)
    given = task.info.get("difficulty")
    candidate.difficulty = NOT_GIVEN if given is None or str(given).strip() == "" else str(given)
    if played is None:
        return candidate
    calls = list(played.executed())
    candidate.format = format_faults(played, settings.rollout.mode, settings.reward.require_stop_marker)
    errors = Counter(item.status.value for item in calls if item.status in POLICY_ERRORS)
    candidate.policy_errors = dict(sorted(errors.items()))
    candidate.tool_faults = sum(is_tool_fault(item.observation) for item in calls)
    candidate.n_calls = played.n_calls
    candidate.length = sum(len(turn.text) for turn in played.turns)
    return candidate
