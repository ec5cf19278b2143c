"""Best of n and balance: properties over any candidates in any order."""

from collections import Counter, defaultdict
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rltr_verl.coldstart.ledger import Candidate, Reason
from rltr_verl.coldstart.ranking import balance, keep_best
from rltr_verl.coldstart.records import Outcome

SCORES = (0.0, 1 / 3, 2 / 3, 1.0)


def candidate(query="q", number=0, score=1.0, n_calls=1, length=10, difficulty="easy"):
    item = Candidate(f"{query}/{number}", query, number, Outcome.OK, difficulty)
    item.score, item.n_calls, item.length = score, n_calls, length
    return item


figures = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 9),
    st.sampled_from(SCORES),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(["easy", "hard", "not given"]),
)
some = st.lists(figures, max_size=24, unique_by=lambda values: values[:2]).map(
    lambda found: [candidate(*values) for values in found]
)


def outcome(candidates):
    return {item.id: (item.reason, item.detail) for item in candidates}


@given(some, st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_does_not_matter(candidates, keep, random):
    shuffled = [replace(item) for item in candidates]
    random.shuffle(shuffled)
    for group in (candidates, shuffled):
        keep_best(group, keep)
        balance(group, 1.5, seed=3)
    assert outcome(candidates) == outcome(shuffled)


@given(some, st.integers(1, 4))
def test_at_most_k_of_a_query_and_never_a_worse_one(candidates, keep):
    keep_best(candidates, keep)
    groups = defaultdict(list)
    for item in candidates:
        groups[item.query_id].append(item)
    for group in groups.values():
        kept = [item for item in group if item.kept]
        dropped = [item for item in group if not item.kept]
        assert len(kept) == min(keep, len(group))
        assert all(item.reason is Reason.NOT_BEST for item in dropped)
        for worse in dropped:
            for better in kept:
                assert better.score >= worse.score
                if better.score == worse.score:
                    assert (better.n_calls, better.length, better.number) < (worse.n_calls, worse.length, worse.number)


@given(some, st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 5))
def test_no_difficulty_exceeds_its_cap_and_the_lowest_scores_go(candidates, ratio, seed):
    keep_best(candidates, keep=10)
    before = Counter(item.difficulty for item in candidates)
    balance(candidates, ratio, seed)
    cap = max(1, int(ratio * min(before.values(), default=0)))
    for name, count in before.items():
        group = [item for item in candidates if item.difficulty == name]
        kept = [item.score for item in group if item.kept]
        assert len(kept) == min(count, cap)
        assert all(score <= min(kept) for score in (item.score for item in group if not item.kept))


def test_ties_fall_to_fewer_calls_then_less_text_then_the_lower_number():
    group = [
        candidate(number=0, score=2 / 3, n_calls=1, length=1),
        candidate(number=1, n_calls=3, length=5),
        candidate(number=2, n_calls=2, length=9),
        candidate(number=3, n_calls=2, length=8),
        candidate(number=4, n_calls=2, length=8),
    ]
    keep_best(group, 1)
    assert [item.number for item in group if item.kept] == [3]
    places = {item.number: item.detail.split(";")[0] for item in group}
    assert places == {3: "place 1 of 5", 4: "place 2 of 5", 2: "place 3 of 5", 1: "place 4 of 5", 0: "place 5 of 5"}
    assert group[0].detail == "place 5 of 5; the first is q/3"


def test_the_seed_draws_between_equal_scores():
    def kept(seed):
        group = [candidate(query=f"q{number}", difficulty="hard") for number in range(20)]
        group.append(candidate(query="other"))
        keep_best(group, 1)
        balance(group, 5.0, seed)
        return {item.id for item in group if item.kept and item.difficulty == "hard"}

    assert len(kept(1)) == len(kept(2)) == 5
    assert kept(1) == kept(1) and kept(1) != kept(2)


def test_nothing_kept_needs_no_balance():
    balance([], 1.0, 1)
    dropped = candidate()
    dropped.settle(Reason.BELOW_THRESHOLD)
    balance([dropped], 1.0, 1)
    assert dropped.reason is Reason.BELOW_THRESHOLD
