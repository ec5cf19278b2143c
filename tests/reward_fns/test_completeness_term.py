"""R_comp: the mean of the checker's readable votes, or no number at all."""

import pytest

from rltr_verl.errors import Unscored
from rltr_verl.judge import Checker, Vote, Votes
from rltr_verl.reward_fns.completeness import Completeness
from rltr_verl.trajectory import Trajectory


class Given(Checker):
    """A checker that hands out the votes it was given."""

    def __init__(self, *values):
        self.values = values

    async def check(self, trajectory, row):
        votes = tuple(value if isinstance(value, Vote) else Vote(value) for value in self.values)
        if all(vote.verdict is None for vote in votes):
            raise Unscored("no votes")
        return Votes(votes, {"prompt": "p@00000f123456"})


async def test_mean_over_readable_votes():
    result = await Completeness(checker=Given(1, None, 0, 1)).score(Trajectory("q"), {})
    assert result.value == pytest.approx(2 / 3)
    assert result.metrics["acc"] == pytest.approx(2 / 3) and result.metrics["votes"] == 3.0
    assert result.record == {"votes": [1, None, 0, 1], "prompt": "p@00000f123456"}


async def test_metrics_say_what_the_votes_took():
    votes = (
        Vote(1, latency_s=2.0, prompt_tokens=100, completion_tokens=20, cost=0.5),
        Vote(0, cached=True),
        Vote(1, latency_s=0.5, prompt_tokens=100, completion_tokens=5, cost=0.25),
        Vote(None, failure="no readable verdict in '?'", unreadable=True, prompt_tokens=10),
    )
    term = Completeness(checker=Given(*votes))
    result = await term.score(Trajectory("q"), {})
    assert set(result.metrics) == set(term.metric_keys)
    assert result.metrics == {
        "acc": pytest.approx(2 / 3),
        "votes": 3.0,
        "votes_agree": pytest.approx(2 / 3),
        "votes_unreadable": 0.25,
        "votes_cached": 0.25,
        "judge_s": 2.0,
        "judge_tokens": 235.0,
        "judge_cost": 0.75,
        "judge_prompt": 15.0,
    }


async def test_no_readable_vote_is_no_number():
    with pytest.raises(Unscored):
        await Completeness(checker=Given(None, None)).score(Trajectory("q"), {})
