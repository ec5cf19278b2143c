"""OpenAI-style messages -> Trajectory; the reading side of :meth:`Trajectory.from_messages`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rltr_verl.call_styles import PLAIN, foreign_style
from rltr_verl.errors import DataError
from rltr_verl.parsing import parse_turn, read_call
from rltr_verl.rows import without_none
from rltr_verl.schemas import argument_problem, schema_index, schema_problem
from rltr_verl.tool_arguments import coerced
from rltr_verl.trajectory import CUT_ENDS, Observation, Status, ToolCall, Trajectory, Turn, is_tool_fault

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_ROLES = frozenset({"function", "observation", "ipython"})
"""What the older OpenAI form, GLM and Llama call the role ``tool``."""
_CUT = ("length", "max_tokens")


def read_messages(
    messages: Sequence[Message], query: str | None, *, tools: Iterable[Message], prefilled_think: bool
) -> Trajectory:
    """See :meth:`rltr_verl.trajectory.Trajectory.from_messages`."""
    schemas = tuple(_schema(tool, place) for place, tool in enumerate(_plain(tools)))
    index = schema_index(schemas)
    turns: list[Turn] = []
    pending: list[Message] = []
    ids: list[str | None] = []
    for row, message in enumerate(messages):
        role, text = _role(message, row), _text(message, row)
        if role == "assistant":
            _attach(turns, ids, pending, index)
            turn, ids = _assistant_turn(message, text, row, prefilled_think)
            turns.append(turn)
        elif role == "tool":
            pending.append({**message, "content": text})
        elif role == "user" and query is None:
            query = text
    answered = bool(pending)
    _attach(turns, ids, pending, index)
    end = _end(turns, messages)
    if end in CUT_ENDS and turns and not answered:  # what the cut left of a call is no mistake
        turns[-1] = replace(turns[-1], observations=())
    return Trajectory(query=query or "", turns=tuple(turns), tools=schemas, end=end)


def _role(message: Any, row: int) -> str:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        fix = 'write {"role": ..., "content": ...}.'
        raise DataError("a message must be an object with a role", where=f"messages[{row}]", fix=fix)
    if message["role"] in _TOOL_ROLES:
        return "tool"
    if message["role"] not in ROLES:
        problem = f"unknown role {message['role']!r}"
        fix = f"use one of {', '.join(ROLES)}; what a tool returned has the role tool."
        raise DataError(problem, where=f"messages[{row}]", fix=fix)
    return message["role"]


def _plain(value: Any) -> Any:
    """The list in place of the array that pandas makes of it."""
    return value.tolist() if hasattr(value, "tolist") else value


def _schema(tool: Any, place: int) -> dict[str, Any]:
    """An OpenAI tool schema, without the None that parquet puts into structs."""
    schema = without_none(tool)
    problem = schema_problem(schema)
    if problem:
        raise DataError(f"is no tool schema ({problem})", where=f"tools[{place}]", fix="give OpenAI tool schemas.")
    return schema


def _text(message: Message, row: int) -> str:
    """A message's text; of a list of parts, that of its text parts."""
    content = _plain(message.get("content"))
    texts = [_part(part) for part in content] if _is_list(content) else [content]
    known = [text for text in texts if isinstance(text, str)]
    if any(text is not None and not isinstance(text, str) for text in texts):
        problem, fix = f"the content is no text (given: {str(content)[:60]})", "write a text (json.dumps of a result)."
        raise DataError(problem, where=f"messages[{row}]", fix=fix)
    return "".join(known)


def _part(part: Any) -> Any:
    return part.get("text") if isinstance(part, Mapping) else part


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _assistant_turn(message: Message, text: str, row: int, prefilled_think: bool) -> tuple[Turn, list[Any]]:
    """A turn from raw text, from ``tool_calls``, or from both (then the text is thought and the calls come after)."""
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning and "</think>" not in text:
        text = f"<think>\n{reasoning}\n</think>\n{text}"
    given = _plain(message.get("tool_calls"))
    turn = parse_turn(text, prefilled_think)
    if not given:
        return turn, [None] * len(turn.calls)
    if not _is_list(given):
        fix = "write a list of calls or leave it out."
        raise DataError("tool_calls must be a list", where=f"messages[{row}]", fix=fix)
    # A call in plain text is only quoted where the server has parted the calls from the text.
    turn = replace(turn, calls=tuple(call for call in turn.calls if foreign_style(call.error) not in PLAIN))
    ids: list[Any] = [None] * len(turn.calls)
    calls = [read_call(_raw_call(call, f"messages[{row}].tool_calls[{at}]")) for at, call in enumerate(given)]
    return _with_calls(turn, calls), ids + [call.get("id") if isinstance(call, Mapping) else None for call in given]


def _with_calls(turn: Turn, calls: list[ToolCall]) -> Turn:
    """The turn of a message whose server has parted calls and text; the calls are written behind the text."""
    blocks = "\n".join(f"<tool_call>\n{call.raw}\n</tool_call>" for call in calls)
    faults = [fault for fault in turn.faults if fault != "empty_turn"]
    if turn.stopped and "call_and_answer" not in faults:
        faults.append("call_and_answer")
    return replace(
        turn,
        text=f"{turn.text}\n{blocks}" if turn.text else blocks,
        calls=(*turn.calls, *calls),
        answer=turn.answer if turn.stopped else None,
        faults=tuple(faults),
    )


def _raw_call(call: Any, where: str) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if isinstance(function, Mapping):
        function = {key: function[key] for key in ("name", "arguments", "parameters") if key in function}
    try:
        return json.dumps(function, ensure_ascii=False, default=lambda value: value.tolist())  # numpy's, of parquet
    except (AttributeError, TypeError, ValueError) as error:
        fix = "write the arguments as JSON or its text."
        raise DataError(f"is no JSON ({error})", where=where, fix=fix) from None


def _attach(turns: list[Turn], ids: list[Any], pending: list[Message], index: Mapping[str, Message]) -> None:
    """Give the collected tool messages to the calls of the last turn; by id first, then in order."""
    if not turns:
        pending.clear()
        return
    turn = turns[-1]
    by_id = {str(message["tool_call_id"]): message for message in pending if message.get("tool_call_id")}
    matched = [by_id.get(str(call_id)) if call_id else None for call_id in ids]
    used = {id(message) for message in matched if message is not None}
    rest = iter([message for message in pending if id(message) not in used])
    answers = [message if message is not None else next(rest, None) for message in matched]
    observations = tuple(_observation(call, answer, index) for call, answer in zip(turn.calls, answers, strict=True))
    turns[-1] = replace(turn, observations=observations)
    pending.clear()


def _observation(call: ToolCall, message: Message | None, index: Mapping[str, Message]) -> Observation:
    if message is None:
        # Nothing came back. The policy's own mistake shows in the call all the same; a sound call was not executed.
        status = call_status(call, index)
        return Observation("", Status.NOT_EXECUTED if status is Status.OK else status, call.name)
    text = message["content"]
    return Observation(text, _status(call, message, text, index), call.name)


def _status(call: ToolCall, message: Message, text: str, index: Mapping[str, Message]) -> Status:
    status = _given_status(message)
    if status is None:
        status = call_status(call, index)
        if status is Status.OK:
            status = structured_status(text)
    if status is Status.OK and is_tool_fault(Observation(text)):
        return Status.TOOL_FAILED
    return status


def _given_status(message: Message) -> Status | None:
    given = message.get("status")
    if given is None:
        return None
    try:
        return Status(given)
    except ValueError:
        names = ", ".join(status.value for status in Status)
        raise DataError(f"unknown status {given!r}", where="a tool message", fix=f"use one of {names}.") from None


def call_status(call: ToolCall, index: Mapping[str, Message]) -> Status:
    """What the call alone tells: unreadable, unknown tool, arguments that break the schema, or ok.

    Without any schema (``index`` empty) every readable call is ok, since nothing says which tools exist.
    """
    if call.arguments is None:
        return Status.UNREADABLE
    if not index:
        return Status.OK
    if call.name is None or call.name not in index:
        return Status.UNKNOWN_TOOL
    parameters = index[call.name]
    problem = argument_problem(parameters, coerced(parameters, call.arguments))
    return Status.BAD_ARGUMENTS if problem else Status.OK


def structured_status(text: str) -> Status:
    """Status that a tool states in its own JSON result: ``status: "error"`` or an ``exit_code`` other than 0.

    In whatever case, and with the code as a number or as its text.

    Such a result is a program of the policy that failed, so it is charged. Plain text is never searched for words.
    """
    text = text.lstrip("\ufeff \t\r\n")
    if not text.startswith("{"):
        return Status.OK
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return Status.OK
    status, code = value.get("status"), value.get("exit_code")
    failed = isinstance(status, str) and status.strip().casefold() == "error"
    return Status.BAD_ARGUMENTS if failed or _is_failure(code) else Status.OK


def _is_failure(code: Any) -> bool:
    """Whether an exit code is one of failure."""
    if isinstance(code, str) and re.fullmatch(r"-?[0-9]{1,9}", code.strip()):
        code = int(code)
    return isinstance(code, int) and not isinstance(code, bool) and code != 0


def _end(turns: list[Turn], messages: Sequence[Message]) -> str:
    """How it ended: by what the last turn holds, or by the ``finish_reason`` that a server gave with it."""
    if not turns:
        return "aborted"
    last = turns[-1]
    if last.stopped:
        return "answer"
    given = next(message.get("finish_reason") for message in reversed(messages) if message["role"] == "assistant")
    if given in _CUT:
        return "length"
    return "turn_limit" if last.calls else "no_call"
