"""The reply of a chat server: what counts as a finished one, and what is wrong with the others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, Literal

Kind = Literal["transport", "timeout", "deadline", "http", "context_overflow", "cut_off", "body"]

_PASSING = (408, 425, 429)
_FINISHED = re.compile(r".*stop.*|eos.*|end.*", re.IGNORECASE)
_BROKEN_OFF = re.compile(r"abort|error|cancel|timeout|resource", re.IGNORECASE)

_OVERFLOW = re.compile(
    r"context[ _](?:length|size|window)|max_model_len|(?:input|prompt)s?\b.{0,40}\btoo long|too many (?:input )?tokens"
    r"|longer than the model'?s|exceeds? the (?:model'?s )?max\w* (?:allowed |input |sequence )*(?:length|tokens)"
    r"|reduce the length|inputs?` tokens \+|上下文长度|(?:输入|提示).{0,10}(?:过长|超)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class ChatReply:
    """A finished chat completion.

    Attributes:
        content: the visible text; empty where the server sent none.
        reasoning: what a server with a reasoning parser kept apart; never part of ``content``.
        finish: the server's finish_reason.
        prompt_tokens, completion_tokens: as the server counts them; 0 if it does not say.
        latency_s: of the request that was answered, without waits and earlier attempts.
        url: the base URL that answered.
        tool_calls: as the server parted them from the text, where a policy's turn was asked for.
    """

    content: str
    reasoning: str | None
    finish: str
    prompt_tokens: int
    completion_tokens: int
    latency_s: float
    url: str
    tool_calls: tuple[dict[str, Any], ...] = ()

    @property
    def was_cut(self) -> bool:
        """Whether max_tokens ended it."""
        return self.finish in ("length", "max_tokens")


class ChatFailed(Exception):
    """No finished completion, after whatever retries could help.

    Attributes:
        kind: what went wrong last. ``timeout`` is that of one request, ``deadline`` the caller's; ``cut_off`` is a
            reply that the model did not end itself (max_tokens, a filter, a tool call); ``body`` is a 200 that holds
            no completion, or one that the server broke off.
        url, status, body: the server, its HTTP status and the start of its reply, where there is one.
        sent: the fields that were added for that URL.
        prompt_tokens, completion_tokens: what the server counted all the same.
    """

    def __init__(self, kind: Kind, reason: str, *, status: int | None = None, body: str = "") -> None:
        super().__init__(reason)
        self.kind, self.status, self.body = kind, status, body
        self.url = ""
        self.sent: Mapping[str, Any] = {}
        self.prompt_tokens = self.completion_tokens = 0
        self.retry_after: float | None = None

    @property
    def may_pass(self) -> bool:
        """Whether trying again can help."""
        if self.kind == "http":
            return self.status in _PASSING or (self.status or 0) >= 500
        return self.kind in ("transport", "timeout", "body")


Read = Callable[[int, Mapping[str, str], bytes, str, float], ChatReply]
"""(status, headers, body, base URL, latency) -> the reply; raises ChatFailed for one that is of no use."""


def read_finished(status: int, headers: Mapping[str, str], raw: bytes, url: str, latency_s: float) -> ChatReply:
    """A text that the model ended itself. Raises ChatFailed for every other reply."""
    reply, text = _reply(_message, status, headers, raw, url, latency_s)
    if not _FINISHED.fullmatch(reply.finish):
        raise _cut_off(reply, text)
    return reply


def read_turn(status: int, headers: Mapping[str, str], raw: bytes, url: str, latency_s: float) -> ChatReply:
    """A turn of a policy: calls, declined requests and texts that were cut off are replies too.

    Raises ChatFailed for what is no completion, or one that the server broke off.
    """
    return _unbroken(*_reply(_turn, status, headers, raw, url, latency_s))


def read_completion(status: int, headers: Mapping[str, str], raw: bytes, url: str, latency_s: float) -> ChatReply:
    """As :func:`read_turn`, of the text completions API."""
    return _unbroken(*_reply(_completion, status, headers, raw, url, latency_s))


def _unbroken(reply: ChatReply, text: str) -> ChatReply:
    if _BROKEN_OFF.search(reply.finish):
        raise _cut_off(reply, text)
    return reply


def _reply(
    part: Callable[[Any], dict[str, Any]],
    status: int,
    headers: Mapping[str, str],
    raw: bytes,
    url: str,
    latency_s: float,
) -> tuple[ChatReply, str]:
    """The first choice as ``part`` reads it, and the body's text."""
    text = raw.decode("utf-8-sig", "replace")
    if status != 200:
        raise _refusal(status, headers, text)
    try:
        body = json.loads(text, object_pairs_hook=_unique)
        choice = body["choices"][0]
        read = part(choice)
        if body.get("error") or choice.get("error"):
            raise _no_completion(text)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise _no_completion(text) from None
    usage = body.get("usage")
    read |= {name: _count(usage, name) for name in ("prompt_tokens", "completion_tokens")}
    read["finish"] = str(choice.get("finish_reason") or "stop")
    return ChatReply(**read, latency_s=latency_s, url=url), text


def _message(choice: Any) -> dict[str, Any]:
    message = choice["message"]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    content = "" if message.get("refusal") else _text(message.get("content"))
    return {"content": content, "reasoning": _text(reasoning) or None}


def _turn(choice: Any) -> dict[str, Any]:
    message = choice["message"]
    calls = message.get("tool_calls") or []
    if message.get("function_call"):  # the older form of one call
        calls = [{"type": "function", "function": message["function_call"]}]
    content = _text(message.get("content")) or _text(message.get("refusal"))
    return {**_message(choice), "content": content, "tool_calls": tuple(dict(call) for call in calls)}


def _completion(choice: Any) -> dict[str, Any]:
    return {"content": str(choice["text"]), "reasoning": None}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys say one thing each."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _refusal(status: int, headers: Mapping[str, str], text: str) -> ChatFailed:
    too_long = status == 413 or (status in (400, 422) and _OVERFLOW.search(text[:4000]) is not None)
    reason = f"HTTP {status}: {shortened(text)}"
    failure = ChatFailed("context_overflow" if too_long else "http", reason, status=status, body=text[:4000])
    failure.retry_after = _retry_after(headers.get("Retry-After"))
    return failure


def _no_completion(text: str) -> ChatFailed:
    too_long = '"error"' in text[:4000] and _OVERFLOW.search(text[:4000]) is not None
    reason = f"the body is no chat completion: {shortened(text)}"
    return ChatFailed("context_overflow" if too_long else "body", reason, status=200, body=text[:4000])


def _cut_off(reply: ChatReply, text: str) -> ChatFailed:
    reason = "the reply was cut off at max_tokens"
    if not reply.was_cut:
        reason = f"the reply was not finished (finish_reason {shortened(reply.finish)})"
    kind: Kind = "body" if _BROKEN_OFF.search(reply.finish) else "cut_off"
    failure = ChatFailed(kind, reason, status=200, body=text[:4000])
    failure.prompt_tokens, failure.completion_tokens = reply.prompt_tokens, reply.completion_tokens
    return failure


_TEXT_PARTS = ("text", "output_text")


def _text(value: Any) -> str:
    """Text of a message's field: a string, or a list of parts (those of text count); anything else holds none."""
    if isinstance(value, list):
        shown = (part for part in value if isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS)
        return "".join(part["text"] for part in shown if isinstance(part.get("text"), str))
    return value if isinstance(value, str) else ""


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and value > 0 else 0


def _retry_after(value: str | None) -> float | None:
    """Seconds from now; the header holds seconds or a date. None if it is absent or unreadable."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = _until(value)
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _until(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp() - time()
    except (ValueError, TypeError, OverflowError):
        return math.nan


def shortened(text: str, room: int = 120) -> str:
    """``text`` on one line, quoted, at most about ``room`` characters; for messages."""
    line = " ".join(text[: 4 * room].split())
    return repr(line if len(line) <= room else line[: room - 3] + "...")
