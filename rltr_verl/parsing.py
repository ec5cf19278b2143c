"""Model text -> Turn. The only parser; rollout, rewards, cold start and evaluation all call :func:`parse_turn`.

Rules, each with one outcome used everywhere:

* What stands inside ``<think>`` is thought; calls and answers are read outside of it only. An unclosed ``<think>``
  swallows the rest of the turn and is a format fault.
* ``<tool_call>`` holds one JSON object, several, or a list of them. The JSON decides where a call ends, so a string may
  contain any tag. A block that cannot be read is one :class:`ToolCall` with ``error``; it is never dropped.
* ``arguments`` (or ``parameters``) is an object, or a JSON string of an object, decoded once. Missing arguments,
  duplicate keys, NaN and numbers too long to read make the call unreadable; nothing is repaired by guessing.
* A turn ends at ``<answer>``. A planner writes nothing after it; end to end, ``<answer>text</answer>`` holds the
  answer.

One pass over the tags: linear time in the length of the text. After :data:`MAX_UNREADABLE` unreadable blocks the rest
of the turn is one more of them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from rltr_verl.trajectory import ToolCall, Turn

STOP_MARKER = "<answer>"
MAX_UNREADABLE = 64
"""Each failed decode costs a pass over the text (for the line number in its message), so their number is bounded."""

_TAG = re.compile(
    r"</?think>|</?tool_call>|</?answer>|</?tool_response>|<[|｜](?:im_start|im_end|endoftext|eot_id|start_header_id)[|｜]>"
)
_SPACE = re.compile(r"\s*")
_TURN_END = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>")


def parse_turn(text: str, prefilled_think: bool = False) -> Turn:
    """Read one assistant turn.

    Args:
        text: what the model wrote, special tokens included or not; one trailing end-of-turn token is ignored.
        prefilled_think: the prompt already opened ``<think>``, so the text starts inside it.

    Returns:
        A :class:`Turn` without observations. Never raises on any text.
    """
    body = _without_turn_end(text)
    scan = _Scan(body, thinking=prefilled_think)
    scan.run()
    return scan.turn(text)


def _without_turn_end(text: str) -> str:
    body = text.rstrip()
    for token in _TURN_END:
        if body.endswith(token):
            return body[: -len(token)].rstrip()
    return body


@dataclass
class _Scan:
    """State of the single pass: where we are, what was found so far."""

    text: str
    thinking: bool = False
    position: int = 0
    thought: list[str] = field(default_factory=list)
    visible: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    unreadable: int = 0
    answers: list[list[str]] = field(default_factory=list)
    faults: dict[str, None] = field(default_factory=dict)
    answering: bool = False
    closed_answer: bool = False

    def run(self) -> None:
        """Walk over the tags; each handler moves ``position`` behind what it consumed."""
        while match := _TAG.search(self.text, self.position):
            self._take(self.text[self.position : match.start()])
            self.position = match.end()
            self._tag(match)
        self._take(self.text[self.position :])
        if self.thinking:
            self._fault("unbalanced_think")

    def turn(self, text: str) -> Turn:
        """Assemble the result; see :class:`Turn` for what ``answer`` means without a marker."""
        visible = "".join(self.visible).strip()
        stopped = bool(self.answers)
        if not stopped and not self.calls and not visible:
            self._fault("empty_turn")
        if stopped and self.calls:
            self._fault("call_and_answer")
        answer = "".join(self.answers[-1]).strip() if stopped else (visible or None)
        return Turn(
            text=text,
            thought="".join(self.thought).strip(),
            calls=tuple(self.calls),
            answer=None if self.calls and not stopped else answer,
            stopped=stopped,
            faults=tuple(self.faults),
        )

    def _fault(self, name: str) -> None:
        self.faults.setdefault(name)

    def _take(self, piece: str) -> None:
        """Plain text between two tags goes to where we currently are."""
        if self.thinking:
            self.thought.append(piece)
        elif self.answering:
            self.answers[-1].append(piece)
        else:
            self.visible.append(piece)
            if self.closed_answer and piece.strip():
                self._fault("text_after_answer")

    def _tag(self, match: re.Match[str]) -> None:
        tag = match.group()
        if tag[1] in "|｜":
            self._fault("forged_role")
        elif "think" in tag:
            self._think(tag)
        elif self.thinking:
            self.thought.append(tag)
        elif "answer" in tag:
            self._answer(tag)
        elif "tool_response" in tag:
            self._fault("forged_tool_response")
        elif self.answering:
            self._fault("call_in_answer")
            self.answers[-1].append(tag)
        elif tag == "<tool_call>":
            self._tool_call()
        else:
            self._stray_close(tag)

    def _stray_close(self, tag: str) -> None:
        if self.unreadable <= MAX_UNREADABLE:
            self._add_unreadable(None, tag, "</tool_call> without <tool_call>")

    def _add_unreadable(self, name: str | None, raw: str, why: str) -> None:
        self.calls.append(ToolCall(name, None, raw, why))
        self.unreadable += 1

    def _think(self, tag: str) -> None:
        if tag == "<think>":
            if self.thinking:
                self._fault("nested_think")
            self.thinking = True
            return
        if not self.thinking:
            self._fault("unbalanced_think")
            self.thought += self.visible
            self.visible.clear()
        self.thinking = False

    def _answer(self, tag: str) -> None:
        if tag == STOP_MARKER:
            if self.answers:
                self._fault("two_answers")
            self.answers.append([])
            self.answering, self.closed_answer = True, False
        elif self.answering:
            self.answering, self.closed_answer = False, True
        else:
            self._fault("unbalanced_answer")

    def _tool_call(self) -> None:
        start = self.position
        if self.unreadable >= MAX_UNREADABLE:
            self._add_unreadable(None, self.text[start:], "too many unreadable blocks before this one")
            self.position = len(self.text)
            return
        values, end, problem = _json_values(self.text, start)
        close = re.compile(r"\s*</tool_call>").match(self.text, end) if not problem else None
        if close:
            self.position = close.end()
            self._readable_block(values, self.text[start : close.start()])
            return
        end, closed = self._block_end(start)
        self.position = end + (len("</tool_call>") if closed else 0)
        raw = self.text[start:end]
        why = (problem or "text after the JSON value") if closed else "<tool_call> is not closed"
        self._add_unreadable(_name_hint(raw), raw.strip(), why)

    def _readable_block(self, values: list[Any], raw: str) -> None:
        """A block is all calls or one unreadable call, so that no part of it is run on a guess."""
        flat = values[0] if len(values) == 1 and isinstance(values[0], list) else values
        calls = [_to_call(value, raw if len(flat) == 1 else None) for value in flat]
        broken = next((call for call in calls if call.error), None)
        if not calls or broken:
            name = broken.name if broken else None
            why = (broken and broken.error) or "the block holds no call"
            self._add_unreadable(name, raw.strip(), why)
        else:
            self.calls += calls

    def _block_end(self, start: int) -> tuple[int, bool]:
        """End of an unreadable block: its closing tag, else the next opening one, else the end of the text."""
        for match in _TAG.finditer(self.text, start):
            if match.group() == "</tool_call>":
                return match.start(), True
            if match.group() in ("<tool_call>", "<think>", STOP_MARKER):
                return match.start(), False
        return len(self.text), False


def _json_values(text: str, start: int) -> tuple[list[Any], int, str | None]:
    """Decode consecutive JSON values from ``start``; returns them, where they end, and why reading stopped early."""
    values: list[Any] = []
    position = _skip_space(text, start)
    while text[position : position + 1] in ("{", "["):
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            return values, position, _why(error)
        values.append(value)
        end, position = position, _skip_space(text, position)
        if text[position : position + 1] not in ("{", "["):
            position = end
            break
    return values, position, None if values else "no JSON object in <tool_call>"


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "JSON is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg}"
    return f"not valid JSON: {error}"


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("an object names the same key twice")
    return {_clean(key): _clean(value) for key, value in pairs}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _read_int(digits: str) -> int:
    if len(digits) > 300:
        raise ValueError("a number has more than 300 digits")
    return int(digits)


def _read_float(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number is out of range")
    return value


_DECODER = json.JSONDecoder(
    strict=False,
    object_pairs_hook=_unique_pairs,
    parse_constant=_refuse_constant,
    parse_int=_read_int,
    parse_float=_read_float,
)


def _clean(value: Any) -> Any:
    """Replace lone surrogates, which no UTF-8 file or request can carry, by U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value


def _to_call(value: Any, raw: str | None) -> ToolCall:
    text = raw.strip() if raw is not None else json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict):
        return ToolCall(None, None, text, "a call must be a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return ToolCall(None, None, text, 'a call needs a "name"')
    arguments, problem = _arguments(value)
    return ToolCall(name.strip(), arguments, text, problem)


def _arguments(value: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    given = [key for key in ("arguments", "parameters") if key in value]
    if len(given) != 1:
        return None, 'a call needs "arguments"' if not given else 'both "arguments" and "parameters" are given'
    arguments = value[given[0]]
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return None, f'"{given[0]}" is a string that is {_why(error)}'
    if not isinstance(arguments, dict):
        return None, f'"{given[0]}" must be a JSON object'
    return arguments, None


def _name_hint(raw: str) -> str | None:
    """The name of an unreadable call where it can be seen; for messages and records, never to run anything."""
    match = re.search(r'"name"\s*:\s*"([^"\\]{1,100})"', raw[:1000])
    return match.group(1) if match else None
