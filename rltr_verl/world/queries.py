"""Queries about the facts: nine kinds with zero to four needs, in English and Chinese wording.

A *subject* says what is asked, free of language, wording and order (``("Arlen", "Brona", "temperature")``); two queries
with the same kind and subject are the same query. A query carries the shortest right plan of calls, and its *needs*:
what any complete trajectory must have called, with what result.

    kind    calls  needs
    none      0      0    small talk, no tool helps
    calc      1      1    calculator on numbers of the query
    look      1      1    one search
    retry     2      1    worded like look, but the record has moved: the first result names where to search next
    days      2      2    search a date, then days_between
    diff      3      3    two searches, then calculator
    sum       3      3    two searches, then calculator
    rank      3      3    three searches
    total     4      4    three searches, then calculator
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import date
from itertools import combinations
from typing import Any

from rltr_verl.world.facts import (
    ATTRIBUTES,
    CITIES,
    EVENT_ATTRIBUTES,
    EVENTS,
    LANGUAGES,
    REFERENCE_DATES,
    Facts,
    Pair,
    attribute_name,
)

Subject = tuple[str, ...]

NAMES = (
    *("Ada", "Ben", "Chloe", "Dan", "Ella", "Finn", "Gus", "Hana"),
    *("Ivan", "June", "Karl", "Lena", "Milo", "Nora", "Omar", "Pia"),
)
OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}

MIX = {
    "none": 0.06,
    "calc": 0.08,
    "look": 0.12,
    "retry": 0.12,
    "days": 0.14,
    "diff": 0.14,
    "sum": 0.12,
    "rank": 0.12,
    "total": 0.10,
}
"""Share of each kind in train and val."""

LESSON_MIX = {
    "none": 0.02,
    "calc": 0.06,
    "look": 0.06,
    "retry": 0.08,
    "days": 0.12,
    "diff": 0.14,
    "sum": 0.20,
    "rank": 0.14,
    "total": 0.18,
}
"""Share of each kind in the cold start: more of what is hard to copy right, since few conversations go that far."""

WORDINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "none": {
        "en": ("Good morning, {a}!", "Thank you, {a}.", "Nice to meet you, {a}."),
        "zh": ("早上好，{a}！", "谢谢你，{a}。", "很高兴认识你，{a}。"),
    },
    "calc": {
        "en": ("What is {x} {op} {y}?", "Compute {x} {op} {y}."),
        "zh": ("{x} {op} {y} 等于多少？", "请计算 {x} {op} {y}。"),
    },
    "look": {
        "en": ("What is the {attribute} of {a}?", "Tell me the {attribute} of {a}."),
        "zh": ("{a} 的{attribute}是多少？", "请查一下 {a} 的{attribute}。"),
    },
    "days": {
        "en": (
            "How many days from {start} to the {attribute} of {a}?",
            "From {start}, how many days are left until the {attribute} of {a}?",
        ),
        "zh": ("从 {start} 到 {a} {attribute}有多少天？", "从 {start} 算起，离 {a} {attribute}还有几天？"),
    },
    "diff": {
        "en": (
            "How much higher is the {attribute} of {a} than that of {b}?",
            "By how much does {a} exceed {b} in {attribute}?",
        ),
        "zh": ("{a} 的{attribute}比 {b} 高多少？", "就{attribute}而言，{a} 比 {b} 多出多少？"),
    },
    "sum": {
        "en": ("What is the {attribute} of {a} and {b} added up?", "Add the {attribute} of {a} and {b}."),
        "zh": ("{a} 和 {b} 的{attribute}相加是多少？", "请把 {a} 和 {b} 的{attribute}加起来。"),
    },
    "rank": {
        "en": ("Which has the highest {attribute}: {a}, {b} or {c}?", "Who leads in {attribute}, {a}, {b} or {c}?"),
        "zh": ("{a}、{b} 和 {c} 中哪个{attribute}最高？", "哪里的{attribute}最高，{a}、{b} 还是 {c}？"),
    },
    "total": {
        "en": ("What is the total {attribute} of {a}, {b} and {c}?", "Give the total {attribute} of {a}, {b} and {c}."),
        "zh": ("{a}、{b} 和 {c} 的{attribute}总和是多少？", "请求出 {a}、{b} 和 {c} 的{attribute}总和。"),
    },
}
WORDINGS["retry"] = WORDINGS["look"]


@dataclass(frozen=True)
class PlannedCall:
    """One call of a plan."""

    tool: str
    arguments: dict[str, str]

    def text(self) -> str:
        """The call as a planner writes it."""
        body = json.dumps({"name": self.tool, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"


@dataclass(frozen=True)
class Query:
    """A worded query, the shortest right plan, its needs and the reference answer."""

    kind: str
    lang: str
    subject: Subject
    text: str
    plan: tuple[PlannedCall, ...]
    needs: tuple[dict[str, Any], ...]
    reference: str
    pairs: frozenset[Pair]

    @property
    def identity(self) -> tuple[str, Subject]:
        """Queries with the same identity ask the same thing."""
        return self.kind, self.subject


def subjects(kind: str, facts: Facts, pairs: Collection[Pair]) -> list[Subject]:
    """All subjects of a kind that touch only ``pairs``, in a fixed order."""
    return sorted(set(_SUBJECTS[kind](facts, pairs)))


def word(kind: str, subject: Subject, facts: Facts, lang: str, wording: int, rng: random.Random) -> Query:
    """Ask about a subject: pick the order of its entities with ``rng``, fill the wording, derive plan and needs."""
    draft = _Draft(facts, lang)
    _DRAFTERS[kind](draft, subject, rng)
    text = WORDINGS[kind][lang][wording].format(**draft.slots)
    needs = tuple(draft.needs)
    return Query(kind, lang, subject, text, tuple(draft.plan), needs, draft.reference, frozenset(draft.pairs))


def wordings(kind: str) -> list[tuple[str, int]]:
    """All (language, index) under which a kind can be worded."""
    return [(lang, index) for lang in LANGUAGES for index in range(len(WORDINGS[kind][lang]))]


class _Draft:
    """A query in the making; the drafters below fill it."""

    def __init__(self, facts: Facts, lang: str) -> None:
        self.facts, self.lang = facts, lang
        self.slots: dict[str, str] = {}
        self.plan: list[PlannedCall] = []
        self.needs: list[dict[str, Any]] = []
        self.pairs: set[Pair] = set()
        self.reference = ""

    def fill(self, attribute: str, *entities: str) -> None:
        self.slots |= {"attribute": attribute_name(attribute, self.lang), **dict(zip("abc", entities, strict=False))}
        self.pairs |= {(entity, attribute) for entity in entities}

    def search(self, entity: str, attribute: str, *, needed: bool = True) -> str:
        """Plan a search; returns the value under which the pair stands."""
        name, value = attribute_name(attribute, self.lang), self.facts.value(entity, attribute)
        self._call("search", {"query": f"{entity} {name}"}, {"query": [entity, name]}, value if needed else None)
        return value

    def calculate(self, expression: str, numbers: list[str], result: int) -> None:
        self._call("calculator", {"expression": expression}, {"expression": numbers}, str(result))
        self.reference = str(result)

    def count_days(self, start: str, end: str) -> None:
        self.reference = str((date.fromisoformat(end) - date.fromisoformat(start)).days)
        self._call("days_between", {"start": start, "end": end}, {"start": [start], "end": [end]}, self.reference)

    def _call(self, tool: str, arguments: dict[str, str], pieces: dict[str, list[str]], result: str | None) -> None:
        """Plan a call; ``result`` None marks a step on the way that completeness does not ask for."""
        self.plan.append(PlannedCall(tool, arguments))
        if result is not None:
            self.needs.append({"tool": tool, "arguments": pieces, "result": result})


def _draft_none(draft: _Draft, subject: Subject, rng: random.Random) -> None:
    draft.slots["a"] = subject[0]


def _draft_calc(draft: _Draft, subject: Subject, rng: random.Random) -> None:
    x, op, y = subject
    draft.slots |= {"x": x, "op": op, "y": y}
    draft.calculate(f"{x} {op} {y}", [x, y], OPERATIONS[op](int(x), int(y)))


def _draft_look(draft: _Draft, subject: Subject, rng: random.Random) -> None:
    entity, attribute = subject
    draft.fill(attribute, entity)
    draft.reference = draft.search(entity, attribute)


def _draft_retry(draft: _Draft, subject: Subject, rng: random.Random) -> None:
    old, attribute = subject
    draft.fill(attribute, old)
    draft.search(old, attribute, needed=False)
    draft.reference = draft.search(draft.facts.moved[old], attribute)


def _draft_days(draft: _Draft, subject: Subject, rng: random.Random) -> None:
    event, attribute, start = subject
    draft.fill(attribute, event)
    draft.slots["start"] = start
    draft.count_days(start, draft.search(event, attribute))


def _draft_diff(draft: _Draft, subject: Subject, rng: random.Random) -> None:
    *cities, attribute = subject
    cities.sort(key=lambda city: -int(draft.facts.value(city, attribute)))
    draft.fill(attribute, *cities)
    values = [draft.search(city, attribute) for city in cities]
    draft.calculate(" - ".join(values), values, int(values[0]) - int(values[1]))


def _draft_sum(draft: _Draft, subject: Subject, rng: random.Random) -> None:
    *cities, attribute = subject
    rng.shuffle(cities)
    draft.fill(attribute, *cities)
    values = [draft.search(city, attribute) for city in cities]
    draft.calculate(" + ".join(values), values, sum(map(int, values)))


def _draft_rank(draft: _Draft, subject: Subject, rng: random.Random) -> None:
    *cities, attribute = subject
    rng.shuffle(cities)
    draft.fill(attribute, *cities)
    values = [int(draft.search(city, attribute)) for city in cities]
    draft.reference = cities[values.index(max(values))]


_DRAFTERS: dict[str, Callable[[_Draft, Subject, random.Random], None]] = {
    "none": _draft_none,
    "calc": _draft_calc,
    "look": _draft_look,
    "retry": _draft_retry,
    "days": _draft_days,
    "diff": _draft_diff,
    "sum": _draft_sum,
    "rank": _draft_rank,
    "total": _draft_sum,
}


def _names(facts: Facts, pairs: Collection[Pair]) -> Iterator[Subject]:
    yield from ((name,) for name in NAMES)


def _sums(facts: Facts, pairs: Collection[Pair]) -> Iterator[Subject]:
    """Numbers of two digits; a difference is never negative."""
    for x in range(11, 100, 2):
        for y in range(12, 100, 7):
            yield from ((str(max(x, y)), op, str(min(x, y))) for op in OPERATIONS)


def _single(facts: Facts, pairs: Collection[Pair]) -> Iterator[Subject]:
    yield from ((city, attribute) for city, attribute in pairs if city in CITIES)


def _moved(facts: Facts, pairs: Collection[Pair]) -> Iterator[Subject]:
    yield from ((old, attribute) for old, attribute in pairs if old in facts.moved)


def _dated(facts: Facts, pairs: Collection[Pair]) -> Iterator[Subject]:
    """Events after a reference date, so that the count is positive."""
    for event, attribute in ((event, attribute) for event in EVENTS for attribute in EVENT_ATTRIBUTES):
        if (event, attribute) in pairs:
            starts = (start.isoformat() for start in REFERENCE_DATES)
            yield from ((event, attribute, s) for s in starts if s < facts.values[event, attribute])


def _groups(size: int) -> Callable[[Facts, Collection[Pair]], Iterator[Subject]]:
    """Sets of cities asked about one attribute, with values all different (a difference, and who leads, is clear)."""

    def generate(facts: Facts, pairs: Collection[Pair]) -> Iterator[Subject]:
        for attribute in ATTRIBUTES:
            cities = [city for city in CITIES if (city, attribute) in pairs]
            for group in combinations(cities, size):
                if len({facts.value(city, attribute) for city in group}) == size:
                    yield (*group, attribute)

    return generate


_SUBJECTS: dict[str, Callable[[Facts, Collection[Pair]], Iterator[Subject]]] = {
    "none": _names,
    "calc": _sums,
    "look": _single,
    "retry": _moved,
    "days": _dated,
    "diff": _groups(2),
    "sum": _groups(2),
    "rank": _groups(3),
    "total": _groups(3),
}
