"""Trajectory -> the messages that a judge reads.

The judge sees the query, the tool schemas, and per call its name, arguments, status and observation. It does not see
thoughts or other text of the policy: they call nothing and could only plead. All text from the policy and from tools
stands between two lines with a random token. Its lines are quoted with ``| ``, so that it cannot forge a call or a
status, and marks in it are disarmed (:mod:`rltr_verl.judge.neutral`).

Where the record is too long, observations are cut in the middle, the longest first; those of the last turns keep most.
Query, tools and calls are never cut, except the text of a call that could not be read.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template

from rltr_verl.errors import Unscored
from rltr_verl.judge.fitting import cut, estimate_tokens, fits, shares
from rltr_verl.judge.neutral import MARK, neutralise
from rltr_verl.judge.prompt_files import JOBS, LANGUAGES, PromptPack, load_prompt, load_prompt_file
from rltr_verl.trajectory import ExecutedCall, Status, Trajectory

__all__ = [
    "JOBS",
    "LANGUAGES",
    "PromptPack",
    "answer_messages",
    "fit",
    "judge_messages",
    "load_prompt",
    "load_prompt_file",
    "new_token",
    "placeholder_messages",
]

Message = dict[str, str]

_PLACEHOLDER = "TOKEN"
_TEMPLATE_TOKENS = 32
"""What a chat template may put around two messages."""
_UNREADABLE_CHARS = 500
_LAST_TURNS, _LAST_WEIGHT = 2, 4.0
_TRIES = (1.0, 0.7, 0.4, 0.15, 0.0)
"""Shares of the room that observations get, in turn: text of uneven density can exceed its estimate."""
_NAME = re.compile(r"[\w.:/-]{1,100}")
_ENDINGS = {
    "answer": "The planner stopped by itself.",
    "no_call": "The planner stopped by itself.",
    "turn_limit": "The planner was cut off at the turn limit, before it stopped by itself.",
    "length": "The planner was cut off at the length limit, before it stopped by itself.",
    "aborted": "The planner was cut off by a fault of the system.",
}


def new_token() -> str:
    """A delimiter token (24 hex digits) that nobody could know when the text was written.

    Draw one for each check: its votes share it, so that the server's prefix cache serves all but the first.
    """
    return secrets.token_hex(12)


def judge_messages(
    trajectory: Trajectory, prompt: PromptPack, max_chars: int, token: str | None = None
) -> list[Message]:
    """Chat messages that ask for a verdict on ``trajectory``, for a judge whose context has no known limit.

    Args:
        max_chars: see :func:`fit`.
        token: stands in the delimiter lines; None draws one.
    """
    return fit(trajectory, prompt, None, 0, max_chars, token)


def fit(
    trajectory: Trajectory,
    prompt: PromptPack,
    limit_tokens: int | None,
    reply_tokens: int,
    max_chars: int,
    token: str | None = None,
) -> list[Message]:
    """Chat messages that ask for a verdict on ``trajectory`` and leave room for the reply. Linear time.

    Args:
        limit_tokens: context length of the judge; None is no limit.
        reply_tokens: longest reply, reasoning included.
        max_chars: length of the record in characters; calls that are longer are kept all the same, with a quarter of
            it for observations.
        token: stands in the delimiter lines; None draws one.

    Raises:
        Unscored: prompt, tools, query and calls alone do not fit into the judge's context.
    """
    view = _View.of(trajectory, prompt, token or new_token())
    sizes = shares(view.lengths, view.weights, max(max_chars - view.fixed_chars, max_chars // 4))
    messages = view.messages(sizes)
    if limit_tokens is None:
        return messages
    room = limit_tokens - reply_tokens - _TEMPLATE_TOKENS
    if fits(_joined(messages), room):
        return messages
    return _compacted(view, sizes, room)


def answer_messages(
    query: str, answer: str, prompt: PromptPack, reference: str | None = None, token: str | None = None
) -> list[Message]:
    """Chat messages that ask for a verdict on a final answer (jobs correctness, helpfulness, relevance)."""
    token = token or new_token()
    texts = {"query": query, "answer": answer, "reference": "(none)" if reference is None else reference}
    return _filled(prompt, {name: _quoted(text, token) for name, text in texts.items()} | {"token": token})


def placeholder_messages(messages: Sequence[Mapping[str, str]], token: str) -> list[Message]:
    """``messages`` with a fixed word for ``token``: the same for the same trajectory, for cache keys and seeds."""
    return [{**message, "content": message["content"].replace(token, _PLACEHOLDER)} for message in messages]


@dataclass(frozen=True)
class _View:
    """What a judge may see of a trajectory, before it is known how much of each observation fits."""

    prompt: PromptPack
    token: str
    tools: str
    query: str
    heads: tuple[str, ...]
    observations: tuple[str | None, ...]
    turns: tuple[int, ...]
    failed: int
    end: str

    @classmethod
    def of(cls, trajectory: Trajectory, prompt: PromptPack, token: str) -> _View:
        items = list(trajectory.executed())
        tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in trajectory.tools) or "(not stated)"
        return cls(
            prompt=prompt,
            token=token,
            tools=_disarmed(tools, token),
            query=_quoted(trajectory.query, token),
            heads=tuple(_head(number, item, token) for number, item in enumerate(items, 1)),
            observations=tuple(_observation(item) for item in items),
            turns=tuple(item.turn for item in items),
            failed=sum(item.status is not Status.OK for item in items),
            end=_ENDINGS.get(trajectory.end, trajectory.end),
        )

    @property
    def lengths(self) -> list[int]:
        return [len(text or "") for text in self.observations]

    @property
    def weights(self) -> list[float]:
        """Observations of the last turns that made a call weigh more."""
        last = sorted(set(self.turns))[-_LAST_TURNS:]
        return [_LAST_WEIGHT if turn in last else 1.0 for turn in self.turns]

    @property
    def fixed_chars(self) -> int:
        return len(self.query) + sum(map(len, self.heads))

    def messages(self, sizes: Sequence[int]) -> list[Message]:
        """The messages with each observation cut to its size."""
        calls = [self._call(index, size) for index, size in enumerate(sizes)]
        record = "\n\n".join([f"Query:\n{self.query}", *(calls or ["No call was made."]), self.end])
        counts = {
            "calls": str(len(self.heads)),
            "failed": str(self.failed),
            "cut": str(sum(size < length for size, length in zip(sizes, self.lengths, strict=True))),
        }
        return _filled(self.prompt, {"tools": self.tools, "record": record, "token": self.token, **counts})

    def _call(self, index: int, size: int) -> str:
        text = self.observations[index]
        if text is None:
            return self.heads[index]
        return f"{self.heads[index]}\nObservation:\n{_quoted(cut(text, size), self.token)}"


def _compacted(view: _View, sizes: Sequence[int], room: int) -> list[Message]:
    """Cut observations by tokens until all fits, to nothing if need be."""
    shown = [cut(text or "", size) for text, size in zip(view.observations, sizes, strict=True)]
    tokens = [estimate_tokens(_quoted(text, view.token)) for text in shown]
    fixed = estimate_tokens(_joined(view.messages([0] * len(sizes))))
    for share in _TRIES:
        kept = shares(tokens, view.weights, (room - fixed) * share)
        smaller = [size * keep // max(1, total) for size, keep, total in zip(sizes, kept, tokens, strict=True)]
        messages = view.messages(smaller)
        if fits(_joined(messages), room):
            return messages
    problem = (
        f"the trajectory does not fit into the judge's context (calls alone about {fixed} tokens, room for {room})"
    )
    fix = "use a judge with a longer context (rltr.judge.context_tokens), or lower rltr.judge.max_tokens."
    raise Unscored(problem, where="judge prompt", fix=fix)


def _head(number: int, item: ExecutedCall, token: str) -> str:
    """First lines of a call: name, arguments, status. One line each, whatever the policy wrote."""
    call = item.call
    name = call.name or "(no name)"
    name = name if _NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)
    why = f" ({' '.join(call.error.split())})" if call.error else ""
    if call.arguments is None:
        written, below = "(unreadable)", f"\nWritten:\n{_quoted(cut(call.raw, _UNREADABLE_CHARS), token)}"
    else:
        written, below = "\\n".join(json.dumps(call.arguments, ensure_ascii=False).splitlines()), ""
    head = _disarmed(f"{name} {written}", token)
    return f"Call {number} (turn {item.turn + 1}): {head}{below}\nStatus: {item.status.value}{_disarmed(why, token)}"


def _observation(item: ExecutedCall) -> str | None:
    return None if item.status is Status.NOT_EXECUTED else item.observation.text


def _quoted(text: str, token: str) -> str:
    return "\n".join(f"| {line}" for line in _disarmed(text, token).splitlines() or [""])


def _disarmed(text: str, token: str) -> str:
    """Without live marks, without the token (nobody can have known it) and without lone surrogates."""
    text = neutralise(text.encode("utf-8", "replace").decode())
    return text.replace(token, token[:1] + MARK + token[1:])


def _filled(prompt: PromptPack, values: Mapping[str, str]) -> list[Message]:
    user = Template(prompt.user).substitute(values)
    return [{"role": "system", "content": prompt.system}, {"role": "user", "content": user}]


def _joined(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)
