"""A teacher behind OpenAI-compatible servers, in the place of the policy in the planner's own loop.

``rltr.teacher.style``: ``chat`` sends messages and tools and lets the server's template render them; a reply's thought,
text and calls become the text of a turn as the planner would sample it. ``completions`` sends the ids that the rollout
stands at, and takes the text that follows: exact, for a teacher with the planner's own tokenizer.

Whatever the teacher writes behind the stop marker is dropped, as a rollout never samples it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltr_verl.coldstart.records import Task, Usage
from rltr_verl.coldstart.teacher import Played, Teacher, TeacherFailed
from rltr_verl.config import TeacherSettings
from rltr_verl.errors import BudgetSpent
from rltr_verl.judge.asking import Endpoint
from rltr_verl.judge.replies import ChatFailed, ChatReply, read_completion, read_turn
from rltr_verl.parsing import STOP_MARKER
from rltr_verl.rollout.turn_text import turn_text
from rltr_verl.rollout.turns import Planner, Rollout, SampledIds, query_of, take_turns

_NODE = "rltr.teacher"
_FATAL = (401, 403, 404)


class _OutOfRoom(Exception):
    """The teacher's context or longest reply ended the trajectory."""


class EndpointTeacher(Teacher):
    """Plays queries with the model of ``rltr.teacher``.

    Args:
        planner: the one that is to learn: its prompts, tools, limits and parser.
        account: folder of the budget's account; None: this process alone.

    Raises:
        ConfigError: no URL or model, a key variable that is not set, or a budget without prices.
    """

    def __init__(self, planner: Planner, account: Path | None = None) -> None:
        self.planner, self.settings = planner, planner.settings.teacher
        chat = self.settings.style == "chat"
        self.endpoint = Endpoint(
            self.settings,
            _NODE,
            account=account,
            path="/chat/completions" if chat else "/completions",
            read=read_turn if chat else read_completion,
        )
        self._style = _Chat if chat else _Completions
        self.name = self.endpoint.model

    async def play(self, task: Task) -> Played:
        """See :class:`Teacher`."""
        shown = self.planner.shown(task.info)
        prompt = [dict(message) for message in task.prompt]
        rollout = Rollout(
            self.planner.template.prompt_ids(prompt, list(shown.values())), self.settings.max_trajectory_tokens
        )
        deadline = asyncio.get_running_loop().time() + self.settings.deadline_s
        session = self._style(self, task, rollout, list(shown.values()), deadline)
        try:
            await asyncio.wait_for(self._turns(rollout, session, list(shown), task), self.settings.deadline_s)
        except _OutOfRoom:
            rollout.end = "length"
        except asyncio.TimeoutError:
            reason = f"not finished within rltr.teacher.deadline_s={self.settings.deadline_s:g}"
            raise TeacherFailed(reason, usage=session.usage) from None
        except BudgetSpent as error:
            raise TeacherFailed(str(error), fatal=True, usage=session.usage) from None
        except ChatFailed as failure:
            raise TeacherFailed(_reason(failure), fatal=failure.status in _FATAL, usage=session.usage) from None
        return Played(rollout.trajectory(query_of(prompt, task.info), shown), session.usage)

    async def close(self) -> None:
        """See :class:`Teacher`."""
        await self.endpoint.close()

    async def _turns(self, rollout: Rollout, session: _Session, allowed: list[str], task: Task) -> None:
        await take_turns(self.planner, rollout, session.generate, allowed, task.info)


@dataclass
class _Session(ABC):
    """One trajectory's requests."""

    teacher: EndpointTeacher
    task: Task
    rollout: Rollout
    schemas: list[dict[str, Any]]
    deadline: float
    usage: Usage = field(default_factory=Usage)

    async def generate(self, ids: list[int], max_tokens: int) -> SampledIds:
        """The teacher's next turn, in ids of the planner's tokenizer."""
        limit = min(self.settings.max_tokens, max_tokens)
        payload = {**self.payload(ids), "max_tokens": limit, "seed": self.task.seed}
        if self.settings.top_p is not None:
            payload["top_p"] = self.settings.top_p
        try:
            reply, spent = await self.teacher.endpoint.ask(payload, self.deadline)
        except ChatFailed as failure:
            self._add(failure.prompt_tokens, failure.completion_tokens, 0.0, 0.0)
            if failure.kind == "context_overflow" and self.rollout.turns:
                raise _OutOfRoom from None
            raise
        self._add(spent.prompt_tokens, spent.completion_tokens, spent.money, reply.latency_s)
        text = _to_marker(self.text(reply))
        if reply.was_cut and STOP_MARKER not in text:
            self._cut(text)
        return SampledIds(self.template.encode(text))

    @property
    def settings(self) -> TeacherSettings:
        return self.teacher.settings

    @property
    def template(self) -> Any:
        return self.teacher.planner.template

    @abstractmethod
    def payload(self, ids: list[int]) -> dict[str, Any]:
        """What this request asks for."""

    @abstractmethod
    def text(self, reply: ChatReply) -> str:
        """The turn as the planner would sample it."""

    def _cut(self, text: str) -> None:
        """The turn did not end: it stands in the trajectory, which ends with it."""
        self.rollout.add_sampled(SampledIds(self.template.encode(text)))
        self.rollout.turns.append(self.teacher.planner.read(text))
        raise _OutOfRoom

    def _add(self, prompt: int, completion: int, cost: float, seconds: float) -> None:
        self.usage = self.usage + Usage(prompt, completion, cost, seconds)


@dataclass
class _Chat(_Session):
    """Messages and tools; see the module."""

    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [dict(message) for message in self.task.prompt]

    def payload(self, ids: list[int]) -> dict[str, Any]:
        if self.rollout.turns:
            self._show_results()
        body: dict[str, Any] = {"messages": self.messages}
        return {**body, "tools": self.schemas} if self.schemas else body

    def text(self, reply: ChatReply) -> str:
        self.messages.append(_echo(reply, self.settings.keep_reasoning))
        return turn_text(self.template, reply.content, reply.reasoning, reply.tool_calls)

    def _show_results(self) -> None:
        """The last turn's observations, as the planner sees them."""
        calls = self.messages[-1].get("tool_calls") or []
        for index, item in enumerate(self.rollout.turns[-1].observations):
            given = calls[index].get("id") if index < len(calls) else None
            self.messages.append({"role": "tool", "tool_call_id": given or f"call_{index}", "content": item.text})


@dataclass
class _Completions(_Session):
    """The ids so far; see the module."""

    def payload(self, ids: list[int]) -> dict[str, Any]:
        ends = {"stop": [STOP_MARKER], "include_stop_str_in_output": True, "skip_special_tokens": False}
        return {"prompt": ids, **ends}

    def text(self, reply: ChatReply) -> str:
        return reply.content


def _echo(reply: ChatReply, keep_reasoning: bool) -> dict[str, Any]:
    """The reply as a message of the conversation, as the server gave it."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        message["tool_calls"] = list(reply.tool_calls)
    if reply.reasoning and keep_reasoning:
        message["reasoning_content"] = reply.reasoning
    return message


def _to_marker(text: str) -> str:
    """``text`` up to the first stop marker, where a rollout's sampling ends."""
    head, marker, _ = text.partition(STOP_MARKER)
    return head + marker


def _reason(failure: ChatFailed) -> str:
    """For messages; a refused request names what to set."""
    fix: Mapping[int | None, str] = {
        401: f" Check {_NODE}.api_key_env.",
        403: f" Check {_NODE}.api_key_env.",
        404: f" Check {_NODE}.base_url (it ends in /v1) and {_NODE}.model.",
    }
    return f"{failure.url or _NODE}: {failure}.{fix.get(failure.status, '')}"
