"""The facts of the world: invented cities with measured values, dated events, and records that have moved.

Every fact is one *pair* (entity, attribute) with one value. Entity names are the same in English and Chinese text;
attribute names are translated. A few pairs are held out: no training query touches them, in any kind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

LANGUAGES = ("en", "zh")

CITIES = (
    *("Arlen", "Brona", "Corvik", "Dunmar", "Eskel", "Farrow", "Galdin", "Hexby"),
    *("Ilvane", "Jorvan", "Kestrel", "Lunden", "Mirava", "Norwyn", "Ostrel", "Pyrnas"),
    *("Quorra", "Rivask", "Selmor", "Tavish", "Ulbrik", "Vandor", "Wexley", "Yarrow"),
)
OLD_NAMES = ("Abrith", "Belcor", "Cindra", "Dravek", "Elowin", "Fenmoor", "Grimsel", "Hollin", "Istria", "Jasmund")
NEW_NAMES = ("Zarnok", "Ythera", "Xandel", "Worlin", "Velkas", "Umbria", "Thorne", "Sorvex", "Rundal", "Pelham")
EVENTS = (
    *("Lantern Fair", "Harvest Feast", "River Race", "Glass Show"),
    *("Winter Ball", "Kite Rally", "Stone Market", "Moon Parade"),
)

ATTRIBUTES = {"temperature": "气温", "population": "人口", "elevation": "海拔"}
EVENT_ATTRIBUTES = {"opening": "开幕", "closing": "闭幕"}

YEAR = 2031
REFERENCE_DATES = tuple(date(YEAR, month, 1) for month in range(1, 13))
"""Dates a question may count from."""

EVENT_DATES = tuple(date(YEAR, month, day) for month in range(1, 13) for day in (4, 9, 13, 18, 22, 27))
"""Dates an event can open or close on: few enough for each to be one token of the tiny planner."""

Pair = tuple[str, str]


def attribute_name(attribute: str, lang: str) -> str:
    """The attribute as text of a language writes it."""
    return attribute if lang == "en" else (ATTRIBUTES | EVENT_ATTRIBUTES)[attribute]


@dataclass(frozen=True)
class Facts:
    """Values of all pairs. ``moved`` maps an old name to the new one under which its records stand now."""

    values: dict[Pair, str]
    moved: dict[str, str]
    held_out: frozenset[Pair]

    def value(self, entity: str, attribute: str) -> str:
        """Value of a pair, also when it is asked under an old name."""
        return self.values[self.moved.get(entity, entity), attribute]

    def record(self, entity: str, attribute: str, lang: str) -> str:
        """The document's text about a pair: its value, or where the record has moved to."""
        label = f"{entity} {attribute_name(attribute, lang)}"
        if entity in self.moved:
            return f"{label}: {'see' if lang == 'en' else '见'} {self.moved[entity]}"
        return f"{label}: {self.values[entity, attribute]}"

    def documents(self) -> Iterator[dict[str, str]]:
        """All documents of the search corpus, one per pair and language."""
        for entity, attribute in self._asked_pairs():
            for lang in LANGUAGES:
                key = f"{entity} {attribute_name(attribute, lang)}"
                yield {"key": key, "text": self.record(entity, attribute, lang)}

    def _asked_pairs(self) -> Iterator[Pair]:
        yield from self.values
        yield from ((old, attribute) for old in self.moved for attribute in ATTRIBUTES)


def make_facts(seed: int) -> Facts:
    """Draw the world's values, moves and held-out pairs; the same seed gives the same facts."""
    rng = random.Random(f"facts {seed}")
    return Facts(*_values_and_moves(rng), _held_out(rng))


def make_sibling(facts: Facts, seed: int, number: int) -> Facts:
    """The same names and held-out pairs with other values and moves.

    A planner that learns from many siblings has to read what a tool returns; remembering values does not help it.
    """
    return Facts(*_values_and_moves(random.Random(f"sibling {seed} {number}")), facts.held_out)


def _values_and_moves(rng: random.Random) -> tuple[dict[Pair, str], dict[str, str]]:
    values = _city_values(rng) | _event_dates(rng)
    return values, dict(zip(OLD_NAMES, rng.sample(NEW_NAMES, len(NEW_NAMES)), strict=True))


def _city_values(rng: random.Random) -> dict[Pair, str]:
    """Two-digit values, the three of a city all different, so that a value tells which pair was read."""
    values: dict[Pair, str] = {}
    for city in CITIES + NEW_NAMES:
        drawn = rng.sample(range(10, 100), len(ATTRIBUTES))
        values |= {(city, attribute): str(value) for attribute, value in zip(ATTRIBUTES, drawn, strict=True)}
    return values


def _event_dates(rng: random.Random) -> dict[Pair, str]:
    """Each event closes one to three event dates after its opening."""
    values: dict[Pair, str] = {}
    for event in EVENTS:
        opening = rng.randrange(len(EVENT_DATES) - 3)
        closing = opening + rng.randrange(1, 4)
        values |= {(event, "opening"): EVENT_DATES[opening].isoformat()}
        values |= {(event, "closing"): EVENT_DATES[closing].isoformat()}
    return values


def _held_out(rng: random.Random) -> frozenset[Pair]:
    """Four cities per attribute, five old names, three events: one pair of each, so that the entity itself is known."""
    cities = rng.sample(CITIES, 4 * len(ATTRIBUTES))
    pairs = {(city, attribute) for i, attribute in enumerate(ATTRIBUTES) for city in cities[4 * i : 4 * i + 4]}
    pairs |= {(old, rng.choice(list(ATTRIBUTES))) for old in rng.sample(OLD_NAMES, 5)}
    pairs |= {(event, rng.choice(list(EVENT_ATTRIBUTES))) for event in rng.sample(EVENTS, 3)}
    return frozenset(pairs)
