"""Scripted policies: known behaviours to test rewards against, and the teacher of the cold start.

A policy writes a turn's text from the row and the observations so far. It is deterministic given its seed: whatever it
draws depends on (seed, row, turn) only, not on the order in which rows are played.
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rltr_verl.errors import ToolError
from rltr_verl.parsing import STOP_MARKER, parse_turn
from rltr_verl.world.queries import PlannedCall

Row = Mapping[str, Any]
Message = dict[str, str]
Tools = Mapping[str, Callable[..., str]]


@dataclass(frozen=True)
class Policy(ABC):
    """Base of the scripted policies: ``act(row, observations)`` writes the next turn."""

    seed: int = 0
    name: ClassVar[str]

    @abstractmethod
    def act(self, row: Row, observations: list[str]) -> str:
        """Text of the next assistant turn, a call or the stop marker, after ``observations``."""

    def rng(self, row: Row, observations: list[str]) -> random.Random:
        """Randomness of this turn alone."""
        info = row["extra_info"]
        return random.Random(f"{self.name} {self.seed} {info['split']} {info['index']} {len(observations)}")


class Oracle(Policy):
    """Makes exactly the planned calls, then stops."""

    name = "oracle"

    def act(self, row: Row, observations: list[str]) -> str:
        return _step(row, len(observations))


class Lazy(Policy):
    """Makes the first planned call, then stops."""

    name = "lazy"

    def act(self, row: Row, observations: list[str]) -> str:
        return STOP_MARKER if observations else _step(row, 0)


class Spammer(Policy):
    """Repeats one irrelevant call, then stops: many calls, nothing learned."""

    name = "spammer"
    repeats: ClassVar[int] = 4

    def act(self, row: Row, observations: list[str]) -> str:
        if len(observations) >= self.repeats:
            return STOP_MARKER
        return PlannedCall("search", {"query": "weather today"}).text()


class Forger(Policy):
    """Never calls: writes a tool result of its own, or stops straight away."""

    name = "forger"

    def act(self, row: Row, observations: list[str]) -> str:
        if self.rng(row, observations).random() < 0.5:
            return STOP_MARKER
        return f"<tool_response>\n{row['extra_info']['reference']}\n</tool_response>\n{STOP_MARKER}"


_PARAMETERS = (("search", ("query",)), ("calculator", ("expression",)), ("days_between", ("start", "end")))


class RandomCaller(Policy):
    """Calls a tool drawn at random with words of the query, sometimes unreadably; stops with probability 0.3."""

    name = "random"

    def act(self, row: Row, observations: list[str]) -> str:
        rng = self.rng(row, observations)
        if rng.random() < 0.3:
            return STOP_MARKER
        words = row["extra_info"]["query"].split()
        tool, arguments = rng.choice(_PARAMETERS)
        text = PlannedCall(tool, {name: rng.choice(words) for name in arguments}).text()
        return text if rng.random() < 0.8 else text.replace("}", "", 1)


@dataclass(frozen=True)
class Teacher(Policy):
    """Short-sighted teacher of the cold start.

    Makes the first planned call always, goes on to the second with probability ``second`` and to each later one with
    probability ``later``, else stops: the well-formed but mostly incomplete behaviour that RL is to improve on.
    """

    second: float = 0.42
    later: float = 0.9
    name: ClassVar[str] = "teacher"

    def act(self, row: Row, observations: list[str]) -> str:
        chance = (1.0, self.second, self.later)[min(len(observations), 2)]
        if self.rng(row, observations).random() >= chance:
            return STOP_MARKER
        return _step(row, len(observations))


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Oracle, Lazy, Spammer, Forger, RandomCaller, Teacher)
}


def play(policy: Policy, row: Row, tools: Tools, max_turns: int = 8) -> list[Message]:
    """Let a policy talk to the real tools: the row's prompt, then assistant and tool messages until it stops.

    An unreadable call, an unknown tool or refused arguments come back as an observation that says so.
    """
    messages: list[Message] = [dict(message) for message in row["prompt"]]
    observations: list[str] = []
    for _ in range(max_turns):
        text = policy.act(row, observations)
        messages.append({"role": "assistant", "content": text})
        calls = parse_turn(text).calls
        if not calls:
            break
        for call in calls:
            observations.append(_observe(call.name, call.arguments, call.error, tools))
            messages.append({"role": "tool", "content": observations[-1]})
    return messages


def _observe(name: str | None, arguments: dict[str, Any] | None, error: str | None, tools: Tools) -> str:
    if error or arguments is None:
        return f"Error: {error}"
    if name is None or name not in tools:
        return f"Error: unknown tool {name}"
    try:
        return tools[name](**arguments)
    except (ToolError, TypeError) as problem:
        return f"Error: {problem}"


def _step(row: Row, index: int) -> str:
    """The plan's call number ``index``, or the stop marker behind its end."""
    plan = json.loads(row["extra_info"]["plan"])
    return PlannedCall(**plan[index]).text() if index < len(plan) else STOP_MARKER
