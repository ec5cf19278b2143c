"""Queries whose complete trajectory is known: what attacks are made from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rltr_verl.judge.checklist import Need, shows
from rltr_verl.parsing import STOP_MARKER
from rltr_verl.trajectory import ExecutedCall, Observation, Status, ToolCall, Trajectory

Message = dict[str, Any]

_CHINESE = re.compile(r"[\u3400-\u9fff]")


@dataclass(frozen=True)
class Step:
    """One call beside the answer that came back for it."""

    tool: str
    arguments: Mapping[str, Any] = field(hash=False)
    observation: str
    status: Status = Status.OK

    @property
    def executed(self) -> ExecutedCall:
        """The step as a checker sees it."""
        call = ToolCall(self.tool, dict(self.arguments), call_text(self.tool, self.arguments))
        return ExecutedCall(0, call, Observation(self.observation, self.status, self.tool))

    @property
    def identity(self) -> tuple[str, str]:
        """Equal for the same call with the same answer."""
        return identity(self.executed)

    def messages(self, said: str = "") -> list[Message]:
        """An assistant turn with ``said`` and the call, and the tool's message."""
        text = call_text(self.tool, self.arguments)
        return turn(f"{said}\n{text}" if said else text, self.observation, self.status)


@dataclass(frozen=True)
class Case:
    """A query, its needs, and the steps of a complete trajectory in order."""

    id: str
    query: str
    needs: tuple[Need, ...]
    tools: tuple[dict[str, Any], ...] = field(hash=False)
    steps: tuple[Step, ...]

    @property
    def language(self) -> str:
        """``zh`` for a query with a Chinese character, else ``en``."""
        return "zh" if _CHINESE.search(self.query) else "en"

    @property
    def row(self) -> dict[str, Any]:
        """The query's data as a checker gets it."""
        return {"id": self.id, "query": self.query, "needs": [need.model_dump() for need in self.needs]}

    @property
    def first_need(self) -> Need:
        """The need that the steps meet first."""
        return min(self.needs, key=self._met_at)

    @property
    def last_need(self) -> Need:
        """The need that the steps meet last."""
        return max(self.needs, key=self._met_at)

    def step_for(self, need: Need) -> Step:
        """The first step that meets ``need``."""
        return self.steps[self._met_at(need)]

    def steps_without(self, need: Need) -> tuple[Step, ...]:
        """The steps in order, less all that meet ``need``."""
        return tuple(step for step in self.steps if not need.met_by(step.executed))

    def helped_by(self, step: Step) -> bool:
        """Whether ``step`` meets a need or shows the result of one, under whatever call."""
        results = (need.result for need in self.needs if need.result is not None)
        met = any(need.met_by(step.executed) for need in self.needs)
        return met or any(shows(step.observation, result) for result in results)

    def trajectory(self, messages: Sequence[Message]) -> Trajectory:
        """``messages`` read as a trajectory of this query."""
        return Trajectory.from_messages(messages, self.query, tools=self.tools)

    def complete(self) -> Trajectory:
        """All steps, then the stop marker."""
        return self.trajectory(conversation(self.steps))

    def unmet(self, items: Iterable[ExecutedCall], real: frozenset[tuple[str, str]]) -> list[Need]:
        """The needs that no item meets whose call and answer are in ``real``."""
        genuine = [item for item in items if identity(item) in real]
        return [need for need in self.needs if not any(need.met_by(item) for item in genuine)]

    def _met_at(self, need: Need) -> int:
        return next(index for index, step in enumerate(self.steps) if need.met_by(step.executed))


def case_of(id: str, trajectory: Trajectory, needs: tuple[Need, ...] | None) -> Case | None:
    """A case from a trajectory that meets all ``needs``, of which there is at least one; else None.

    Only the successful calls are kept, one a turn, without thoughts or other text.
    """
    steps = tuple(
        Step(item.call.name, item.call.arguments, item.observation.text)
        for item in trajectory.executed()
        if item.status is Status.OK and item.call.name is not None and item.call.arguments is not None
    )
    if not needs or not all(any(need.met_by(step.executed) for step in steps) for need in needs):
        return None
    return Case(id, trajectory.query, needs, trajectory.tools, steps)


def identity(item: ExecutedCall) -> tuple[str, str]:
    """What makes two executed calls the same: call (see :meth:`ToolCall.key`) and answer."""
    return item.call.key(), item.observation.text


def call_text(tool: str, arguments: Mapping[str, Any]) -> str:
    """A call as a planner writes it."""
    body = json.dumps({"name": tool, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def turn(text: str, observation: str | None = None, status: Status = Status.OK) -> list[Message]:
    """An assistant message, and a tool message where there is an observation."""
    messages: list[Message] = [{"role": "assistant", "content": text}]
    if observation is not None:
        messages.append({"role": "tool", "content": observation, "status": status.value})
    return messages


def conversation(steps: Iterable[Step], said: str = "", end: str = STOP_MARKER) -> list[Message]:
    """The steps, a turn each, with ``said`` before the last turn's ``end``."""
    messages = [message for step in steps for message in step.messages()]
    return messages + turn(f"{said}\n{end}" if said else end)
