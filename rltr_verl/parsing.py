"""Model text -> Turn. The only parser; rollout, rewards, cold start and evaluation all call :func:`parse_turn`.

Rules, each with one outcome used everywhere:

* What stands inside ``<think>`` is thought; calls and answers are read outside of it only. An unclosed ``<think>``
  swallows the rest of the turn and is a format fault. Behind a ``</think>`` that nothing opened, all before it was
  thought, calls included; that is a fault too.
* ``<tool_call>`` holds one JSON object, several, or a list of them. The JSON decides where a call ends, so a string may
  contain any tag. A block that cannot be read is one :class:`ToolCall` with ``error``; it is never dropped.
* ``arguments`` (or ``parameters``) is an object, or a JSON string of an object, decoded once. Missing arguments,
  duplicate keys, NaN, numbers too long to read and values nested too deeply make the call unreadable; nothing is
  repaired by guessing.
* A call in the style of another family (:mod:`rltr_verl.call_styles`) is one unreadable call.
* A turn ends at ``<answer>``. A planner writes nothing after it; end to end, ``<answer>text</answer>`` holds the
  answer.

One pass over the tags: linear time in the length of the text. After :data:`MAX_UNREADABLE` unreadable blocks the rest
of the turn is one more of them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rltr_verl.call_styles import (
    HERMES,
    PLAIN,
    PLAIN_MARKS,
    PLAIN_RESPONSES,
    PLAIN_ROLES,
    RESPONSES,
    ROLES,
    TAGGED,
    TURN_ENDS,
    Style,
    foreign_reason,
    style_of,
)
from rltr_verl.trajectory import ToolCall, Turn

STOP_MARKER = "<answer>"
MAX_UNREADABLE = 64
"""Each failed decode costs a pass over the text (for the line number in its message), so their number is bounded."""
MAX_DEPTH = 64
"""Deepest nesting of arguments; far deeper values overflow the stack of whoever walks through them later."""

MAX_DIGITS = 300
"""Longest number; beyond some thousands Python refuses to read an integer at all."""

_SPACE = re.compile(r"\s*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN = re.compile("|".join(f"(?P<p{index}>{style.opening})" for index, style in enumerate(PLAIN)), re.MULTILINE)

ReadBlock = Callable[[str, int], "Block"]


@dataclass(frozen=True)
class Block:
    """What one block of calls holds and where it ends; ``calls`` are all readable, or one is not and stands for all."""

    calls: list[ToolCall]
    end: int


@dataclass(frozen=True)
class Grammar:
    """How calls are marked and read: ``tags`` finds marks, ``read_block(text, start)`` reads on behind an opening."""

    name: str
    tags: re.Pattern[str]
    read_block: ReadBlock
    ends: re.Pattern[str]

    @classmethod
    def of(cls, name: str, opening: str, closing: str, read_block: ReadBlock) -> Grammar:
        """The grammar of verl's parser ``name``; every other style is foreign to it."""
        foreign = [style for style in TAGGED if style.opening != opening]
        marks = {
            "call": opening,
            "close": closing,
            "think": "</?think>",
            "answer": "</?answer>",
            "response": RESPONSES,
            **{f"foreign{index}": style.opening for index, style in enumerate(TAGGED) if style in foreign},
            "role": ROLES,
        }
        inner = "|".join(f"(?P<{group}>{pattern.removeprefix('<')})" for group, pattern in marks.items())
        tags = re.compile(f"<(?:{inner})")  # the common first character lets the search skip over prose
        return cls(name, tags, read_block, re.compile(f"(?P<close>{closing})|{opening}|<think>|{STOP_MARKER}"))


def parse_turn(text: str, prefilled_think: bool = False) -> Turn:
    """Read one assistant turn.

    Args:
        text: what the model wrote, special tokens included or not; end-of-turn tokens at its end are ignored.
        prefilled_think: the prompt already opened ``<think>``, so the text starts inside it.

    Returns:
        A :class:`Turn` without observations. Never raises on any text.
    """
    return parse_with(_HERMES, text, prefilled_think)


def parse_with(grammar: Grammar, text: str, prefilled_think: bool = False, body: str | None = None) -> Turn:
    """:func:`parse_turn` under another grammar. ``body`` is read in place of ``text`` where a family's thoughts have
    been put into ``<think>`` first."""
    text = clean(text)
    scan = _Scan(grammar, _without_turn_end(text if body is None else clean(body)), thinking=prefilled_think)
    scan.run()
    return scan.turn(text)


def _without_turn_end(text: str) -> str:
    """``text`` without the end-of-turn tokens at its end; more than two of them are no ending but a fault."""
    body = text.rstrip()
    for _ in range(2):
        if body.endswith(TURN_ENDS):
            token = next(token for token in TURN_ENDS if body.endswith(token))
            body = body[: -len(token)].rstrip()
    return body


@dataclass
class _Scan:
    """State of the single pass: where we are, what was found so far."""

    grammar: Grammar
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
        while match := self.grammar.tags.search(self.text, self.position):
            self._take(self.text[self.position : match.start()])
            self.position = match.end()
            self._tag(match.lastgroup or "", match)
        self._take(self.text[self.position :])
        if self.thinking:
            self._fault("unbalanced_think")

    def turn(self, text: str) -> Turn:
        """Assemble the result; see :class:`Turn` for what ``answer`` means without a marker."""
        visible = "".join(self.visible).strip()
        if visible:
            self._plain_styles(visible)
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

    def _tag(self, kind: str, match: re.Match[str]) -> None:
        tag = match.group()
        if kind == "role":
            self._fault("forged_role")
        elif kind == "think":
            self._think(tag)
        elif self.thinking:
            self.thought.append(tag)
        elif kind == "answer":
            self._answer(tag)
        elif kind == "response":
            self._fault("forged_tool_response")
        elif self.answering:
            self._fault("call_in_answer")
            self.answers[-1].append(tag)
        elif kind == "close":
            self._stray_close(tag)
        else:
            self._block(kind, match)

    def _block(self, kind: str, match: re.Match[str]) -> None:
        if self.unreadable >= MAX_UNREADABLE:
            raw, self.position = self.text[match.start() :], len(self.text)
            self._add_unreadable(None, raw, "too many unreadable blocks before this one")
        elif kind == "call":
            self._own_block()
        else:
            self._foreign_block(TAGGED[int(kind.removeprefix("foreign"))], match.start())

    def _own_block(self) -> None:
        block = self.grammar.read_block(self.text, self.position)
        self.position = block.end
        self.calls += block.calls
        self.unreadable += sum(call.error is not None for call in block.calls)

    def _foreign_block(self, style: Style, start: int) -> None:
        """One unreadable call up to the style's own closing, or to where something else begins."""
        match = _foreign_end(style.closing).search(self.text, self.position)
        closed = match is not None and match.lastgroup == "close"
        self.position = len(self.text) if match is None else match.end() if closed else match.start()
        raw = self.text[start : self.position].strip()
        self._add_unreadable(name_hint(raw), raw, foreign_reason(self.grammar.name, style))

    def _plain_styles(self, visible: str) -> None:
        """Calls and roles in styles that no tag opens. Only what the turn shows is searched, not its answer."""
        if "[" in visible or "✿" in visible:
            if PLAIN_ROLES.search(visible):
                self._fault("forged_role")
            if PLAIN_RESPONSES.search(visible):
                self._fault("forged_tool_response")
        if not any(mark in visible for mark in PLAIN_MARKS):
            return
        if (self.calls or self.answers) and not _PLAIN.match(visible):
            return  # beside a call or the stop marker, prose may well quote one
        found = list(itertools.islice(_plain_calls(visible), MAX_UNREADABLE))
        for match, following in itertools.zip_longest(found, found[1:]):
            raw = visible[match.start() : following and following.start()].strip()
            style = PLAIN[int((match.lastgroup or "p0")[1:])]
            self._add_unreadable(name_hint(raw), raw, foreign_reason(self.grammar.name, style))

    def _stray_close(self, tag: str) -> None:
        if self.unreadable <= MAX_UNREADABLE:
            self._add_unreadable(None, tag, f"{tag} without its opening tag")

    def _add_unreadable(self, name: str | None, raw: str, why: str) -> None:
        self.calls.append(ToolCall(name, None, raw, why))
        self.unreadable += 1

    def _think(self, tag: str) -> None:
        if tag == "<think>":
            if self.thinking:
                self._fault("nested_think")
            if self.closed_answer:
                self._fault("text_after_answer")
            self.thinking = True
            return
        if not self.thinking:
            self._fault("unbalanced_think")
            self._all_was_thought()
        self.thinking = False

    def _all_was_thought(self) -> None:
        self.thought += itertools.chain(self.visible, *self.answers)
        self.visible, self.calls, self.answers = [], [], []
        self.answering = self.closed_answer = False

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


def _plain_calls(visible: str) -> Iterator[re.Match[str]]:
    """Where calls in plain text begin; what stands behind an opening mark of a style is its content, not another."""
    marked = False
    for match in _PLAIN.finditer(visible):
        content = PLAIN[int((match.lastgroup or "p0")[1:])].family in ("plain JSON", "plain Python")
        if not (marked and content):
            yield match
        marked = marked or not content


@lru_cache(maxsize=64)
def _foreign_end(closing: str) -> re.Pattern[str]:
    return re.compile(f"(?P<close>{closing})|<think>|<tool_call>|{STOP_MARKER}")


def unreadable_block(grammar: Grammar, text: str, start: int, why: str) -> Block:
    """A block that begins at ``start``, behind its opening tag, as one unreadable call.

    It ends at its closing tag, else at the next opening one, else with the text.
    """
    match = grammar.ends.search(text, start)
    closed = match is not None and match.lastgroup == "close"
    raw = text[start : match.start() if match else len(text)].strip()
    end = len(text) if match is None else match.end() if closed else match.start()
    style = style_of(raw)
    if style is not None and style.parser != grammar.name:
        why = foreign_reason(grammar.name, style)
    elif not closed:
        why = "the block is not closed"
    return Block([ToolCall(name_hint(raw), None, raw, why)], end)


def one_for_all(calls: list[ToolCall], raw: str) -> list[ToolCall]:
    """``calls``, or one unreadable call in their place where one is, so that no part of a block is run on a guess."""
    broken = next((call for call in calls if call.error), None)
    if calls and broken is None:
        return calls
    why = (broken and broken.error) or "the block holds no call"
    return [ToolCall(broken.name if broken else None, None, raw.strip(), why)]


def _read_hermes(text: str, start: int) -> Block:
    values, end, problem = _json_values(text, start)
    close = None if problem else _CLOSE.match(text, end)
    if not close:
        return unreadable_block(_HERMES, text, start, problem or "text after the JSON value")
    raw = text[start : close.start()]
    flat = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    calls = [to_call(value, raw if len(flat) == 1 else None) for value in flat]
    return Block(one_for_all(calls, raw), close.end())


_CLOSE = re.compile(r"\s*</tool_call>")
_HERMES = Grammar.of("hermes", HERMES.opening, HERMES.closing, _read_hermes)


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
    found = {_clean(key): _clean(value) for key, value in pairs}
    if len(found) != len(pairs):
        raise ValueError("an object names the same key twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _read_int(digits: str) -> int:
    return int(_not_too_long(digits))


def _not_too_long(digits: str) -> str:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return digits


def _read_float(digits: str) -> float:
    value = float(_not_too_long(digits))
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


def clean(text: str) -> str:
    """``text`` with lone surrogates, which no UTF-8 file or request can carry, replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub("\ufffd", text)
    return text


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else clean(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value


def read_call(raw: str) -> ToolCall:
    """One call given as the JSON text of ``{"name", "arguments"}``, without any tags."""
    raw = clean(raw)
    try:
        return to_call(_DECODER.decode(raw), raw)
    except (ValueError, RecursionError) as error:
        return ToolCall(name_hint(raw), None, raw, _why(error))


def to_call(value: Any, raw: str | None) -> ToolCall:
    """The call that a JSON value ``{"name", "arguments"}`` describes, unreadable where it does not."""
    text = raw.strip() if raw is not None else json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict):
        return ToolCall(None, None, text, "a call must be a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return ToolCall(None, None, text, 'a call needs a "name"')
    arguments, problem = _arguments(value)
    return ToolCall(name.strip(), arguments, text, problem)


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


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
    if _too_deep(arguments):
        return None, "the arguments are nested too deeply"
    return arguments, None


def name_hint(raw: str) -> str | None:
    """The name of an unreadable call where it can be seen; for messages and records, never to run anything."""
    match = _NAME.search(raw[:1000])
    return match.group(match.lastindex or 0) if match else None


_NAME = re.compile(
    r"[\"']name[\"']\s{0,9}:\s{0,9}[\"']([^\"'\\]{1,100})[\"']|<function=([\w.-]{1,100})>"
    r'|<(?:\w{1,16}:|｜DSML｜)?invoke name="([^"<>]{1,100})">|to=functions\.([\w.-]{1,100})'
    r"|<\|tool_call>call:(\w{1,100})|<\|tool_call_begin\|>(?:functions\.)?([\w.-]{1,100})"
    r"|Action[ \t]*:[ \t]*([\w.-]{1,100})"
)
