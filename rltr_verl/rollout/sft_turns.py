"""A conversation as the turns of a rollout: the prompt, what the policy wrote in each turn, and what it was shown.

What an assistant message holds in parts (``reasoning_content``, ``tool_calls``) becomes the one text that a policy of
that template writes; see :mod:`rltr_verl.rollout.turn_text`. Of a text behind the stop marker nothing is left, since
sampling ends there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rltr_verl.errors import ModelError
from rltr_verl.parsing import STOP_MARKER
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.rollout.turn_text import turn_text

Message = Mapping[str, Any]

_QUESTION, _WORD = "RLTRUSERX", "RLTRASSISTANTX"


class RowRefused(Exception):
    """A conversation cannot be trained. ``kind`` is a name of :data:`FIXES`, ``str(error)`` says what is wrong."""

    def __init__(self, kind: str, problem: str) -> None:
        super().__init__(kind, problem)
        self.kind, self.problem = kind, problem

    def __str__(self) -> str:
        return self.problem


FIXES: Mapping[str, str] = {
    "form": "write a list of messages with the keys role and content.",
    "roles": "store what tools returned with role 'tool', and one query a row.",
    "template": "use another chat template, or drop the row.",
    "too_long": "raise data.max_length or drop the row.",
    "trains_nothing": "write what the assistant said, or use another loss policy.",
    "text": "store the text in Unicode NFC, as the tokenizer writes it.",
    "control": "drop the row: its text holds a token that ends a turn.",
    "mask": "report this with the row; nothing of it is trained.",
    "prompt": "give the rows the recipe's tools in the recipe's order and the same chat template.",
    "thought": "leave enable_thinking=false out, or have the teacher write no thoughts.",
    "no_stop_marker": "select with rltr.reward.require_stop_marker=true.",
}
"""Every reason for which a row is refused, and what to do about it."""


@dataclass(frozen=True)
class WrittenTurn:
    """``text`` as the policy wrote it, the ``end`` token that it sampled behind it (none behind a stop marker), and the
    ``observations`` that it was then shown."""

    text: str
    end: str = ""
    observations: tuple[str, ...] = ()

    @property
    def sampled(self) -> str:
        """All that the policy sampled."""
        return self.text + self.end


@dataclass(frozen=True)
class Conversation:
    """The messages of the prompt and the turns behind it."""

    prompt: tuple[dict[str, Any], ...]
    turns: tuple[WrittenTurn, ...]

    @property
    def query(self) -> str:
        """The last user message."""
        users = [message_text(message) for message in self.prompt if message["role"] == "user"]
        return users[-1] if users else ""


@dataclass(frozen=True)
class TurnStyle:
    """How a template's turns begin and end."""

    template: ChatTemplate

    @property
    def opened(self) -> str:
        """What the generation prompt writes of a thought."""
        return self.template.prompted_thought

    @property
    def opens_thought(self) -> bool:
        """The policy begins inside a thought."""
        return bool(self.opened) and "</think>" not in self.opened

    @property
    def closes_thought(self) -> bool:
        """The policy is not to think."""
        return "</think>" in self.opened

    @cached_property
    def last_end(self) -> str:
        """What a policy samples behind its last turn: the template's end of a turn, else the tokenizer's."""
        turn_end = self.template.glue.turn_end
        messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _WORD}]
        try:
            behind = self._rendered(messages, False).rpartition(_WORD)[2]
        except ModelError:
            return turn_end
        others = (self.template.decode([item]) for item in sorted(self.template.eos_ids))
        return turn_end if turn_end in behind else next((text for text in others if text not in turn_end), turn_end)

    def _rendered(self, messages: Sequence[Message], open_turn: bool) -> str:
        return self.template.decode(self.template.rendered_ids(messages, [], open_turn=open_turn))

    def text(self, message: Message) -> str:
        """What the policy wrote in an assistant's message, its end of turn left out."""
        content = self.without_end(message_text(message))
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = [call if isinstance(call, Mapping) else {"function": call} for call in message.get("tool_calls") or ()]
        thought = reasoning if isinstance(reasoning, str) and not self.closes_thought else None
        if calls or thought or (self.opens_thought and "</think>" not in content):
            return turn_text(self.template, content, thought, calls)
        return content.removeprefix(self.opened) if self.opens_thought else content

    def without_end(self, text: str) -> str:
        """``text`` without the end-of-turn tokens at its end."""
        for end in {self.template.glue.turn_end, self.last_end} - {""}:
            if text.rstrip().endswith(end):
                text = text.rstrip().removesuffix(end)
        return text


def read_conversation(messages: Sequence[Message], style: TurnStyle) -> Conversation:
    """The turns of a conversation.

    Args:
        messages: without the keys that parquet added (:func:`rltr_verl.rows.read_messages`).
        style: of the template that the policy is trained with.

    Raises:
        RowRefused: kind ``form`` or ``roles``.
    """
    first = _first_turn(messages)
    turns = list(_turns(messages[first:], style))
    last = turns[-1]
    if last.observations:
        raise RowRefused("roles", "the conversation does not end with an assistant message")
    return Conversation(tuple(map(dict, messages[:first])), (*turns[:-1], _last(last.text, style)))


def _first_turn(messages: Sequence[Message]) -> int:
    """Behind the first assistant turn a rollout adds assistant turns and tool results, nothing else."""
    if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages):
        raise RowRefused("form", "a message has no role")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise RowRefused("roles", "no assistant turn")
    first = roles.index("assistant")
    other = sorted(set(roles[first:]) - {"assistant", "tool"})
    if other:
        raise RowRefused("roles", f"a message of role '{other[0]}' follows the planner's turns")
    if any(one == other == "assistant" for one, other in zip(roles[first:], roles[first + 1 :], strict=False)):
        raise RowRefused("roles", "two assistant messages follow each other")
    return first


def _turns(messages: Sequence[Message], style: TurnStyle) -> Iterator[WrittenTurn]:
    text, shown = "", list[str]()
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            shown.append(message_text(message))
            continue
        if index:
            yield WrittenTurn(text, style.template.glue.turn_end, tuple(shown))
        text, shown = style.text(message), []
    yield WrittenTurn(text, style.template.glue.turn_end, tuple(shown))


def _last(text: str, style: TurnStyle) -> WrittenTurn:
    """The last turn: cut behind the stop marker where only white space follows, since sampling stops there."""
    stripped = text.rstrip()
    if stripped.endswith(STOP_MARKER):
        return WrittenTurn(stripped)
    return WrittenTurn(text, style.last_end)


def message_text(message: Message) -> str:
    """The text of a message: its content, or its parts of text; empty for null."""
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
