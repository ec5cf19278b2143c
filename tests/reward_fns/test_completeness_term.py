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
        if not any(value is not None for value in self.values):
            raise Unscored("no votes")
        return Votes(tuple(Vote(value) for value in self.values), {"prompt": "p@1"})


async def test_mean_over_readable_votes():
    result = await Completeness(checker=Given(1, None, 0, 1)).score(Trajectory("q"), {})
    assert result.value == pytest.approx(2 / 3)
    assert result.metrics == {"acc": pytest.approx(2 / 3), "votes": 3.0}
    assert result.record == {"votes": [1, None, 0, 1], "prompt": "p@1"}


async def test_no_readable_vote_is_no_number():
    with pytest.raises(Unscored):
        await Completeness(checker=Given(None, None)).score(Trajectory("q"), {})
