"""R_comp: is the sequence of tool calls complete for the query? (RLTR 3.2, Eq. 2)

R_comp is the mean of N votes of a checker, each 0 (a needed call is missing) or 1 (nothing is missing). The final
answer is not looked at, so no reference answer is needed. N is not given in the paper; see ``rltr.judge``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rltr_verl.judge import Checker, Votes
from rltr_verl.reward import RewardTerm, TermResult
from rltr_verl.trajectory import Trajectory


class Completeness(RewardTerm):
    """Mean of the checker's readable votes; raises ``Unscored`` when the checker could not tell.

    Metrics: ``acc`` is R_comp before the weight (verl's core validation metric), ``votes`` the readable votes,
    ``votes_agree`` the share of them on the majority's side, ``votes_unreadable`` and ``votes_cached`` shares of all
    votes, ``judge_s`` the longest vote in seconds, ``judge_tokens`` and ``judge_cost`` the sums over the votes,
    ``judge_prompt`` the first six hex digits of the prompt's version as a number, so that a change of wording shows.
    """

    metric_keys = (
        "acc",
        "votes",
        "votes_agree",
        "votes_unreadable",
        "votes_cached",
        "judge_s",
        "judge_tokens",
        "judge_cost",
        "judge_prompt",
    )

    def __init__(self, *, checker: Checker) -> None:
        self.checker = checker

    async def score(self, trajectory: Trajectory, row: Mapping[str, Any]) -> TermResult:
        """R_comp with what its votes took."""
        result = await self.checker.check(trajectory, row)
        metrics = {"acc": result.mean, **_vote_metrics(result)}
        return TermResult(result.mean, metrics, {"votes": list(result.values), **result.record})


def _vote_metrics(result: Votes) -> dict[str, float]:
    votes = result.votes
    return {
        "votes": float(len(result.readable)),
        "votes_agree": result.agreement,
        "votes_unreadable": sum(vote.unreadable for vote in votes) / len(votes),
        "votes_cached": sum(vote.cached for vote in votes) / len(votes),
        "judge_s": max(vote.latency_s for vote in votes),
        "judge_tokens": float(sum(vote.prompt_tokens + vote.completion_tokens for vote in votes)),
        "judge_cost": sum(vote.cost for vote in votes),
        "judge_prompt": _prompt_number(result.record.get("prompt")),
    }


def _prompt_number(version: str | None) -> float:
    """``name@1a2b3c...`` -> 0x1a2b3c; 0 where no prompt was used."""
    return float(int(version.partition("@")[2][:6], 16)) if version else 0.0
