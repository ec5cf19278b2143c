"""Trajectory -> the messages that a judge reads.

The judge sees the query, the tool schemas, and per call its name, arguments, status and observation. It does not see
thoughts or other text of the policy: they call nothing and could only plead. All text from the policy and from tools
stands between two lines with a token that this text cannot hold.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from string import Template

from rltr_verl.trajectory import ExecutedCall, Status, Trajectory

_SPLIT = "\n=====\n"
_ENDINGS = {
    "answer": "The planner stopped by itself.",
    "no_call": "The planner stopped by itself.",
    "turn_limit": "The planner was cut off at the turn limit, before it stopped by itself.",
    "length": "The planner was cut off at the length limit, before it stopped by itself.",
    "aborted": "The planner was cut off by a fault of the system.",
}


@dataclass(frozen=True)
class PromptPack:
    """The judge prompt of one language; ``version`` is the start of the SHA-256 of its text, for the records."""

    name: str
    system: str
    user: str

    @property
    def version(self) -> str:
        """Name and hash; changes with every change of the wording."""
        return f"{self.name}@{hashlib.sha256((self.system + _SPLIT + self.user).encode()).hexdigest()[:12]}"


@lru_cache
def load_prompt(language: str) -> PromptPack:
    """The shipped completeness prompt in ``en`` or ``zh``."""
    name = f"completeness_{language}"
    text = (resources.files("rltr_verl.judge") / "prompts" / f"{name}.txt").read_text("utf-8")
    system, user = text.split(_SPLIT)
    return PromptPack(name, system.strip(), user.strip())


def judge_messages(trajectory: Trajectory, prompt: PromptPack, max_chars: int) -> list[dict[str, str]]:
    """Chat messages that ask for a verdict on ``trajectory``.

    Args:
        max_chars: length of the record of calls; longer observations are cut in the middle, and say so.
    """
    record = render_record(trajectory, max_chars)
    tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in trajectory.tools) or "(not stated)"
    user = Template(prompt.user).substitute(tools=tools, record=record, token=_token(record))
    return [{"role": "system", "content": prompt.system}, {"role": "user", "content": _sendable(user)}]


def render_record(trajectory: Trajectory, max_chars: int) -> str:
    """Query, every call with status and observation, and how the trajectory ended; at most about ``max_chars``."""
    items = list(trajectory.executed())
    room = max(200, (max_chars - len(trajectory.query)) // max(1, 2 * len(items)))
    calls = [_render_call(number, item, room) for number, item in enumerate(items, 1)]
    body = _cut("\n\n".join(calls) or "No call was made.", max_chars)
    return f"Query: {_cut(trajectory.query, max_chars)}\n\n{body}\n\n{_ENDINGS.get(trajectory.end, trajectory.end)}"


def _render_call(number: int, item: ExecutedCall, room: int) -> str:
    call = item.call
    written = call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)
    head = f"Call {number} (turn {item.turn + 1}): {call.name or '(no name)'} {_cut(written, room)}"
    why = f" ({call.error})" if call.error else ""
    if item.status is Status.NOT_EXECUTED:
        return f"{head}\nStatus: not_executed{why}"
    return f"{head}\nStatus: {item.status.value}{why}\nObservation: {_cut(item.observation.text, room)}"


def _cut(text: str, room: int) -> str:
    """Keep the beginning and the end where ``text`` is longer than ``room`` characters."""
    if len(text) <= room:
        return text
    half = room // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _token(record: str) -> str:
    """A token that ``record`` does not hold: derived from its hash, which its author cannot know while writing it.

    Unlike a random one it makes the same trajectory give the same prompt, so that verdicts are reproducible.
    """
    token = hashlib.sha256(_sendable(record).encode()).hexdigest()[:24]
    while token in record:
        token = hashlib.sha256(token.encode()).hexdigest()[:24]
    return token


def _sendable(text: str) -> str:
    """Without lone surrogates, which no request can carry."""
    return text.encode("utf-8", "replace").decode()
