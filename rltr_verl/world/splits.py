"""Train, val and val_unseen: disjoint by query, and val_unseen also by fact.

A kind's subjects are dealt out before any query is worded: val gets its share, train the rest, so that no query of val
stands in train in another language or wording. val_unseen asks only about held-out pairs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from rltr_verl.world.facts import ATTRIBUTES, CITIES, EVENT_ATTRIBUTES, EVENTS, Facts, Pair
from rltr_verl.world.queries import MIX, Query, Subject, subjects, word, wordings

SPLITS = ("train", "val", "val_unseen")
UNSEEN_KINDS = ("look", "retry", "days", "diff", "sum", "rank", "total")
"""Kinds that touch a fact: ``none`` and ``calc`` have nothing to hold out."""


def make_splits(facts: Facts, seed: int, sizes: dict[str, int]) -> dict[str, list[Query]]:
    """Queries per split, each split in a fixed, shuffled order.

    Args:
        facts: the world's facts.
        seed: same seed, same queries.
        sizes: number of queries of each split in :data:`SPLITS`.

    A split comes out smaller than asked only where a kind has no more different queries (val and val_unseen hold no
    query text twice; train may).
    """
    rng = random.Random(f"splits {seed}")
    seen = all_pairs(facts) - facts.held_out
    unseen_mix = {kind: MIX[kind] for kind in UNSEEN_KINDS}
    splits: dict[str, list[Query]] = {split: [] for split in SPLITS}
    counts = {"train": shares(MIX, sizes["train"]), "val": shares(MIX, sizes["val"])}
    for kind in MIX:
        val, train = _deal(subjects(kind, facts, seen), counts["val"][kind], rng)
        splits["train"] += _with_repeats(kind, train, facts, counts["train"][kind], rng)
        splits["val"] += _without_repeats(kind, val, facts, counts["val"][kind], rng)
    for kind, count in shares(unseen_mix, sizes["val_unseen"]).items():
        splits["val_unseen"] += _without_repeats(kind, subjects(kind, facts, facts.held_out), facts, count, rng)
    for queries in splits.values():
        rng.shuffle(queries)
    return splits


def all_pairs(facts: Facts) -> frozenset[Pair]:
    """Every pair that a query can ask about."""
    cities = {(city, attribute) for city in (*CITIES, *facts.moved) for attribute in ATTRIBUTES}
    return frozenset(cities | {(event, attribute) for event in EVENTS for attribute in EVENT_ATTRIBUTES})


def shares(mix: dict[str, float], total: int) -> dict[str, int]:
    """Split ``total`` by ``mix`` into whole numbers that add up to it (largest remainder)."""
    exact = {kind: total * share / sum(mix.values()) for kind, share in mix.items()}
    counts = {kind: int(value) for kind, value in exact.items()}
    by_remainder = sorted(exact, key=lambda kind: counts[kind] - exact[kind])
    for kind in by_remainder[: total - sum(counts.values())]:
        counts[kind] += 1
    return counts


def _deal(all_subjects: list[Subject], wanted: int, rng: random.Random) -> tuple[list[Subject], list[Subject]]:
    """Subjects for val (as many as queries are wanted, at most a quarter) and for train.

    Where a subject is a single fact, val takes at most one of an entity: train keeps another, so no name is new to it.
    """
    dealt = rng.sample(all_subjects, len(all_subjects))
    first_of = {(subject[0] if len(subject) == 2 else subject): subject for subject in dealt}
    val = list(first_of.values())[: min(wanted, len(dealt) // 4)]
    chosen = set(val)
    return val, [subject for subject in dealt if subject not in chosen]


def _with_repeats(kind: str, pool: list[Subject], facts: Facts, count: int, rng: random.Random) -> Iterator[Query]:
    for _ in range(count):
        lang, wording = rng.choice(wordings(kind))
        yield word(kind, rng.choice(pool), facts, lang, wording, rng)


def _without_repeats(kind: str, pool: list[Subject], facts: Facts, count: int, rng: random.Random) -> list[Query]:
    choices = [(subject, lang, wording) for subject in pool for lang, wording in wordings(kind)]
    drawn = rng.sample(choices, min(count, len(choices)))
    return [word(kind, subject, facts, lang, wording, rng) for subject, lang, wording in drawn]
