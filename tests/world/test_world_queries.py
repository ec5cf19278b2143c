"""Facts, queries and splits."""

from __future__ import annotations

import collections
import random

import pytest

from rltr_verl.world.facts import CITIES, EVENTS, NEW_NAMES, OLD_NAMES, make_facts, make_sibling
from rltr_verl.world.queries import MIX, WORDINGS, subjects, word, wordings
from rltr_verl.world.splits import UNSEEN_KINDS, all_pairs, make_splits, shares

SIZES = {"train": 1000, "val": 128, "val_unseen": 96}
NEEDS = {"none": 0, "calc": 1, "look": 1, "retry": 1, "days": 2, "diff": 3, "sum": 3, "rank": 3, "total": 4}
CALLS = NEEDS | {"retry": 2}


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 5])
def seed(request):
    return request.param


@pytest.fixture(scope="module")
def facts(seed):
    return make_facts(seed)


@pytest.fixture(scope="module")
def splits(facts, seed):
    return make_splits(facts, seed, SIZES)


def test_no_name_stands_inside_another():
    names = [name.casefold() for name in (*CITIES, *OLD_NAMES, *NEW_NAMES, *EVENTS)]
    inside = [(a, b) for a in names for b in names if a != b and a in b]
    assert inside == []
    assert len(set(names)) == len(names)


def test_every_kind_is_asked_in_both_languages_with_its_needs(splits):
    for kind in MIX:
        queries = [query for query in splits["train"] if query.kind == kind]
        assert {query.lang for query in queries} == {"en", "zh"}
        assert {len(query.needs) for query in queries} == {NEEDS[kind]}
        assert {len(query.plan) for query in queries} == {CALLS[kind]}
    assert len(set(NEEDS.values())) == 5 and len(MIX) >= 6


def test_no_query_of_val_stands_in_train(splits):
    train = {query.identity for query in splits["train"]}
    val = [query.identity for query in splits["val"]]
    assert val and not train & set(val)
    assert not {query.text for query in splits["train"]} & {query.text for query in splits["val"]}


def test_unseen_queries_touch_only_held_out_facts(splits, facts):
    asked = {pair for split in ("train", "val") for query in splits[split] for pair in query.pairs}
    unseen = {pair for query in splits["val_unseen"] for pair in query.pairs}
    assert unseen and unseen <= facts.held_out
    assert not asked & facts.held_out
    assert {query.kind for query in splits["val_unseen"]} == set(UNSEEN_KINDS)


def test_held_out_entities_are_known_from_other_facts(splits, facts):
    asked = {entity for query in splits["train"] for entity, _ in query.pairs}
    assert {entity for entity, _ in facts.held_out} <= asked


def test_fixed_sizes_and_no_text_twice(splits):
    assert {name: len(queries) for name, queries in splits.items()} == SIZES
    for name in ("val", "val_unseen"):
        texts = [query.text for query in splits[name]]
        assert len(set(texts)) == len(texts)


def test_mix_is_kept(splits):
    counts = collections.Counter(query.kind for query in splits["train"])
    assert counts == shares(MIX, SIZES["train"])


def test_shares_add_up():
    for total in (1, 7, 64, 999):
        assert sum(shares(MIX, total).values()) == total
    assert shares({"a": 1.0, "b": 2.0}, 4) == {"a": 1, "b": 3}


def test_references_follow_from_the_facts(facts):
    value = lambda city: int(facts.values[city, "elevation"])  # noqa: E731
    a, b, c = CITIES[:3]
    rng = random.Random(0)
    ask = lambda kind, *subject: word(kind, subject, facts, "en", 0, rng)  # noqa: E731
    assert ask("sum", a, b, "elevation").reference == str(value(a) + value(b))
    assert ask("total", a, b, c, "elevation").reference == str(value(a) + value(b) + value(c))
    assert ask("diff", a, b, "elevation").reference == str(abs(value(a) - value(b)))
    assert ask("rank", a, b, c, "elevation").reference == max((a, b, c), key=value)
    assert ask("calc", "12", "*", "11").reference == "132"
    retry = ask("retry", OLD_NAMES[0], "population")
    assert retry.reference == facts.values[facts.moved[OLD_NAMES[0]], "population"]
    assert [call.arguments["query"].split()[0] for call in retry.plan] == [OLD_NAMES[0], facts.moved[OLD_NAMES[0]]]


def test_differences_and_day_counts_are_positive(splits):
    for query in splits["train"]:
        if query.kind in ("diff", "days"):
            assert int(query.reference) > 0, query


def test_text_names_all_that_the_plan_needs_first(splits):
    """What a first call needs stands in the query, so that no planner has to guess."""
    for query in splits["train"]:
        for entity, _ in query.pairs:
            assert entity in query.text


def test_siblings_differ_in_values_only(facts, seed):
    first, second = make_sibling(facts, seed, 0), make_sibling(facts, seed, 1)
    assert first.held_out == second.held_out == facts.held_out
    assert first.values.keys() == facts.values.keys()
    pairs = list(facts.values)
    different = sum(first.values[pair] != facts.values[pair] for pair in pairs) / len(pairs)
    assert different > 0.9
    assert first.moved != second.moved


def test_subjects_are_different_and_in_fixed_order(facts):
    for kind in MIX:
        found = subjects(kind, facts, all_pairs(facts))
        assert found == sorted(set(found)) and found


def test_wordings_are_all_different():
    texts = [text for kind in WORDINGS if kind != "retry" for lang in WORDINGS[kind] for text in WORDINGS[kind][lang]]
    assert len(set(texts)) == len(texts)
    assert wordings("retry") == wordings("look")
