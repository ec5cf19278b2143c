"""Best of n, and as many of each difficulty. Total and deterministic, whatever order the candidates come in."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from rltr_verl.coldstart.ledger import Candidate, Reason

K = TypeVar("K", bound=Hashable)


def keep_best(candidates: Iterable[Candidate], keep: int) -> None:
    """Settle scored candidates: the first ``keep`` of a query are kept, the others are ``not_best``.

    First is the higher score, then fewer calls, then less text of the teacher, then the lower number of the sample.
    RLTR 3.1 takes the best of n and names no tie-break; this one is ours: of two plans that are as complete, the
    shorter one teaches fewer needless calls.
    """
    for group in _by([(item.query_id, item) for item in candidates]).values():
        group.sort(key=_order)
        for place, item in enumerate(group, 1):
            if place <= keep:
                item.settle(Reason.BEST, f"place {place} of {len(group)}")
            else:
                item.settle(Reason.NOT_BEST, f"place {place} of {len(group)}; the first is {group[0].id}")


def balance(candidates: Iterable[Candidate], ratio: float, seed: int) -> None:
    """Drop kept candidates beyond the cap of their difficulty, those with the lowest scores first.

    The cap is the number in the smallest difficulty (of those that have any) times ``ratio``, rounded down, but at
    least 1. Equal scores are drawn by a hash of ``seed`` and the candidate's id.
    """
    groups = _by([(item.difficulty, item) for item in candidates if item.kept])
    if not groups:
        return
    cap = max(1, int(ratio * min(map(len, groups.values()))))
    for name, group in groups.items():
        group.sort(key=lambda item: (-_score(item), _drawn(seed, item.id)))
        for item in group[cap:]:
            item.settle(Reason.BALANCE, f"difficulty {name} has {len(group)}, the cap is {cap}")


def _order(item: Candidate) -> tuple[float, int, int, int]:
    return (-_score(item), item.n_calls, item.length, item.number)


def _score(item: Candidate) -> float:
    assert item.score is not None
    return item.score


def _by(pairs: Sequence[tuple[K, Candidate]]) -> dict[K, list[Candidate]]:
    groups: dict[K, list[Candidate]] = defaultdict(list)
    for key, item in pairs:
        groups[key].append(item)
    return groups


def _drawn(seed: int, id: str) -> bytes:
    return hashlib.blake2b(f"{seed} {id}".encode("utf-8", "replace"), digest_size=8).digest()
