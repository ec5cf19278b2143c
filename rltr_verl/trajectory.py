"""The trajectory: the one type that rollout, rewards, judge prompts, cold start and evaluation share.

A trajectory is s0, a0, ..., aT (RLTR, section 2): turns of thought, calls and observations, ended by the planner's stop
marker. A call that could not be read stays in the trajectory with the reason; it never vanishes. Every observation has
a typed status, so that nobody has to guess from its text whether something went wrong.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

TRAJECTORY_FIELD = "rltr_trajectory"
"""Key of verl's ``extra_fields`` that holds :meth:`Trajectory.to_dict` as JSON text on its way to the reward."""


class Status(str, Enum):
    """How a call ended. Only the first three after ``ok`` can be the policy's own mistake."""

    OK = "ok"
    UNREADABLE = "unreadable"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    TOOL_FAILED = "tool_failed"
    TIMEOUT = "timeout"
    INFRASTRUCTURE = "infrastructure"
    NOT_EXECUTED = "not_executed"


POLICY_ERRORS = frozenset({Status.UNREADABLE, Status.UNKNOWN_TOOL, Status.BAD_ARGUMENTS})
"""The policy's own mistakes: what R_error charges."""

TOOL_SIDE = frozenset({Status.TOOL_FAILED, Status.TIMEOUT, Status.INFRASTRUCTURE})
"""Faults of the surroundings: never charged, and calling again after one is no repeat."""


_KEY = json.JSONEncoder(ensure_ascii=False, sort_keys=True)

CUT_ENDS = frozenset({"length", "aborted"})
"""Endings that may stand in the middle of a turn."""


@dataclass(frozen=True)
class ToolCall:
    """One call as the policy wrote it. ``error`` says why it could not be read; then ``arguments`` is None."""

    name: str | None
    arguments: dict[str, Any] | None
    raw: str
    error: str | None = None

    def key(self) -> str:
        """Canonical form under which two calls are the same call.

        Key order does not matter. Strings are compared after NFKC and with whitespace runs collapsed and trimmed;
        numbers by value (1 equals 1.0); a string, a number and a boolean never equal each other ("1", 1, true). A call
        that could not be read equals only the same raw text.
        """
        if self.arguments is None:
            return f"raw:{self.raw.strip()}"
        return _KEY.encode([self.name, _canonical(self.arguments)])


@dataclass(frozen=True)
class Observation:
    """What came back for one call: the text that the policy saw and a typed status."""

    text: str
    status: Status = Status.OK
    tool: str | None = None
    seconds: float = 0.0


_FAULT_REPORT = re.compile(
    r"^(?:Error (?:executing|calling|running|invoking) tool [\w.:/-]{1,100}:|MCP error -?\d+|McpError:)", re.MULTILINE
)
"""How tool servers report their own failure in a result; the first is what MCP servers in Python send."""


def is_tool_fault(observation: Observation) -> bool:
    """Whether the surroundings failed: by the status or, where that says ``ok``, by a tool server's own report.

    Nobody is charged by a text, and in a rollout nobody is excused by one: there it only shows in the log.
    """
    if observation.status is not Status.OK:
        return observation.status in TOOL_SIDE
    head = observation.text[:4000]
    return ("rror" in head) and _FAULT_REPORT.search(head) is not None


@dataclass(frozen=True)
class Turn:
    """One assistant turn.

    ``text`` is all that the policy wrote; ``thought`` is what stands inside ``<think>``; ``calls`` are read outside of
    it only. ``stopped`` tells whether the stop marker was written; ``answer`` is the text after it (empty for a
    planner), or, in a turn without calls and without marker, the visible text. ``faults`` names breaches of the format.
    """

    text: str
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    stopped: bool = False
    faults: tuple[str, ...] = ()
    observations: tuple[Observation, ...] = ()


@dataclass(frozen=True)
class ExecutedCall:
    """A call beside its observation and the index of its turn."""

    turn: int
    call: ToolCall
    observation: Observation

    @property
    def status(self) -> Status:
        return self.observation.status


@dataclass(frozen=True)
class Trajectory:
    """Turns of a query, the tool schemas they were written under, and how they ended.

    ``end`` is ``answer`` (stop marker), ``no_call`` (a turn with neither call nor marker), ``turn_limit``, ``length``
    (token budget) or ``aborted`` (the rollout engine gave up).
    """

    query: str
    turns: tuple[Turn, ...] = ()
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    end: str = "answer"

    def executed(self) -> Iterator[ExecutedCall]:
        """Every call in order, paired with its observation.

        A readable call without one counts as not executed, an unreadable one as the policy's mistake, unless the end
        of the trajectory cut it off.
        """
        for index, turn in enumerate(self.turns):
            for position, call in enumerate(turn.calls):
                if position < len(turn.observations):
                    seen = turn.observations[position]
                else:
                    cut = index == len(self.turns) - 1 and self.end in CUT_ENDS and call is turn.calls[-1]
                    status = Status.UNREADABLE if call.arguments is None and not cut else Status.NOT_EXECUTED
                    seen = Observation("", status, call.name)
                yield ExecutedCall(index, call, seen)

    @property
    def n_calls(self) -> int:
        """Number of calls that the policy wrote and the loop took up (everything but ``not_executed``)."""
        return sum(item.status is not Status.NOT_EXECUTED for item in self.executed())

    @property
    def answer(self) -> str | None:
        """The last turn's answer, or None."""
        return self.turns[-1].answer if self.turns else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` restores an equal trajectory."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trajectory:
        """Restore what :meth:`to_dict` wrote."""
        return cls(
            query=data["query"],
            turns=tuple(_turn_from_dict(turn) for turn in data["turns"]),
            tools=tuple(dict(tool) for tool in data["tools"]),
            end=data["end"],
        )

    @classmethod
    def from_messages(
        cls,
        messages: Sequence[Mapping[str, Any]],
        query: str | None = None,
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        prefilled_think: bool = False,
    ) -> Trajectory:
        """Read an OpenAI-style conversation: assistant content may hold raw ``<tool_call>`` text or ``tool_calls``.

        Tool messages answer the calls of the assistant turn before them, by ``tool_call_id`` where given, else in
        order; they may carry our ``status``. Without one the status is derived from the call itself and, where the
        observation is a JSON object, from its own ``status`` or ``exit_code`` field. Words in a text make no mistake of
        the policy; a tool server's report of its own failure (:func:`is_tool_fault`) makes ``tool_failed``.

        Raises :class:`rltr_verl.errors.DataError` on a message that is not readable as such.
        """
        from rltr_verl._messages import read_messages

        return read_messages(messages, query, tools=tools, prefilled_think=prefilled_think)


def _turn_from_dict(data: Mapping[str, Any]) -> Turn:
    observations = tuple(Observation(**{**item, "status": Status(item["status"])}) for item in data["observations"])
    calls = tuple(ToolCall(**item) for item in data["calls"])
    texts = [data["text"], *(item.text for item in observations), *(call.raw for call in calls)]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("the text of a turn, a call or an observation is no text")
    plain = {key: data[key] for key in ("text", "thought", "answer", "stopped")}
    return Turn(**plain, calls=calls, faults=tuple(data["faults"]), observations=observations)


def _canonical(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str):
        return "s:" + " ".join((value if value.isascii() else unicodedata.normalize("NFKC", value)).split())
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    return value
