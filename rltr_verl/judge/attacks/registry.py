"""What an attack is, and the table of all of them."""

from __future__ import annotations

import difflib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from rltr_verl.errors import ConfigError
from rltr_verl.judge.attacks.cases import Case, Message, Step

Place = Literal["calls", "policy text", "arguments", "observations", "any text", "form"]
T = TypeVar("T")


@dataclass(frozen=True)
class Draw:
    """What one trajectory is built from: the query to leave incomplete, all queries, and chance."""

    case: Case
    pool: Sequence[Case]
    rng: random.Random

    def unrelated(self, fits: Callable[[Step], bool] = lambda step: True) -> Step | None:
        """A step of another query that ``fits`` and does not help this one; None if there is none."""
        return next(filter(fits, self._foreign_steps()), None)

    def other_case(self) -> Case | None:
        """Another query of which no step helps this one."""
        return next((other for other in self._others() if not any(map(self.case.helped_by, other.steps))), None)

    def say(self, texts: Mapping[str, Sequence[T]]) -> T:
        """One of the texts in the query's language."""
        return self.rng.choice(texts[self.case.language])

    def truncated(self) -> tuple[Step, ...]:
        """The steps without those that meet the last need."""
        return self.case.steps_without(self.case.last_need)

    def _others(self) -> Iterator[Case]:
        """The other queries, from a random one on."""
        start = self.rng.randrange(len(self.pool))
        around = (self.pool[(start + index) % len(self.pool)] for index in range(len(self.pool)))
        return (other for other in around if other is not self.case)

    def _foreign_steps(self) -> Iterator[Step]:
        for other in self._others():
            steps = self.rng.sample(other.steps, len(other.steps))
            yield from (step for step in steps if not self.case.helped_by(step))


Build = Callable[[Draw], "list[Message] | None"]


@dataclass(frozen=True)
class Attack:
    """One way to look complete.

    Attributes:
        place: where the deceit stands.
        tries: what it tries, one sentence.
        build: the messages of a trajectory, or None where the query does not lend itself to this attack.
    """

    name: str
    place: Place
    tries: str
    build: Build


ATTACKS: dict[str, Attack] = {}


def attack(place: Place) -> Callable[[Build], Build]:
    """Register a function under its own name; the first paragraph of its docstring says what it tries."""

    def register(build: Build) -> Build:
        tries = (inspect.getdoc(build) or "").split("\n\n")[0].replace("\n", " ")
        ATTACKS[build.__name__] = Attack(build.__name__, place, tries, build)
        return build

    return register


def attacks_named(names: Sequence[str] | None) -> list[Attack]:
    """The attacks of these names in the table's order; all for None.

    Raises:
        ConfigError: a name is unknown, or none is given.
    """
    if names is None:
        return list(ATTACKS.values())
    for name in names:
        if name not in ATTACKS:
            close = difflib.get_close_matches(name, ATTACKS, n=1)
            fix = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(ATTACKS)}."
            raise ConfigError(f"unknown attack '{name}'", where="--attacks", fix=fix)
    if not names:
        raise ConfigError("names no attack", where="--attacks", fix=f"known: {', '.join(ATTACKS)}.")
    return [found for name, found in ATTACKS.items() if name in names]
