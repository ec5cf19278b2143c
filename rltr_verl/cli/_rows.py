"""Stored trajectories, as ``rltr score`` and ``rltr attack`` read them from a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltr_verl.config import RltrSettings
from rltr_verl.errors import DataError
from rltr_verl.judge.checklist import parse_needs
from rltr_verl.trajectory import Trajectory

FORM = '{"id": ..., "query": ..., "tools": [...], "messages": [...]}'
SHOWN_PROBLEMS = 20
"""Rows that a message names; the others are counted."""

_DUMPED = "trajectory"
"""Field of a line of ``rltr.dump_dir``, which stands for the messages."""


@dataclass(frozen=True)
class StoredRow:
    """One line of the input: its data and the trajectory read from its messages, or from a dump's ``trajectory``."""

    id: Any
    data: dict[str, Any]
    trajectory: Trajectory


def read_stored_rows(path: Path, settings: RltrSettings) -> list[StoredRow]:
    """The rows of a file, blank lines left out.

    Raises:
        DataError: names file, row and field; of several rows that are wrong the first 20, and counts the rest.
    """
    rows: list[StoredRow] = []
    wrong: list[DataError] = []
    lines = [(number, line) for number, line in enumerate(_text(path).split("\n"), 1) if line.strip()]
    for number, line in lines:
        try:
            rows.append(_row(line, number, f"{path}, row {number}", settings))
        except DataError as error:
            wrong.append(error)
    if wrong:
        raise _all_of(wrong, len(lines))
    return rows


def _all_of(wrong: list[DataError], rows: int) -> DataError:
    """One error for all of them."""
    if len(wrong) == 1:
        return wrong[0]
    shown = ["rows that cannot be used:", *map(str, wrong[:SHOWN_PROBLEMS])]
    if len(wrong) > SHOWN_PROBLEMS:
        shown.append(f"... and {len(wrong) - SHOWN_PROBLEMS} more rows")
    end = f"{len(wrong)} of {rows} rows cannot be used."
    return DataError("\n  ".join(shown) + "\n" + end, fix="correct them, then run it again.")


def _text(path: Path) -> str:
    fix = f"give a UTF-8 file of JSON lines, one conversation each: {FORM}."
    try:
        return path.read_text("utf-8-sig")
    except FileNotFoundError:
        raise DataError("no such file", where=str(path), fix="check the path.") from None
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=str(path), fix=fix) from None
    except UnicodeDecodeError as error:
        kind = "is parquet" if path.suffix == ".parquet" else f"is not UTF-8 (byte {error.start + 1})"
        raise DataError(f"the file {kind}", where=str(path), fix=fix) from None


def _row(line: str, number: int, where: str, settings: RltrSettings) -> StoredRow:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON ({error})", where=where, fix=f"write {FORM} on one line.") from None
    if not isinstance(data, dict):
        raise DataError("a row must be a JSON object", where=where, fix=f"write {FORM}.")
    parse_needs(data.get("needs"), where)
    if _DUMPED in data and "messages" not in data:
        return StoredRow(data.get("id", number), data, _dumped(data[_DUMPED], where))
    _check_field(data, "messages", list, where, "write the conversation as a list of {role, content}.")
    _check_field(data, "tools", (list, type(None)), where, "write a list of OpenAI tool schemas, or leave it out.")
    _check_field(data, "query", (str, type(None)), where, "write the user's query as text.")
    return StoredRow(data.get("id", number), data, _trajectory(data, where, settings))


def _dumped(value: Any, where: str) -> Trajectory:
    try:
        return Trajectory.from_dict(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"field '{_DUMPED}' is not a trajectory of a dump ({type(error).__name__}: {error})"
        raise DataError(problem, where=where, fix=f"give lines of rltr.dump_dir as they are, or {FORM}.") from None


def _check_field(data: dict[str, Any], name: str, kind: Any, where: str, fix: str) -> None:
    if name not in data and not isinstance(None, kind):
        raise DataError(f"field '{name}' is missing", where=where, fix=fix)
    if not isinstance(data.get(name), kind):
        given = type(data[name]).__name__
        raise DataError(f"field '{name}' has the wrong type ({given})", where=where, fix=fix)


def _trajectory(data: dict[str, Any], where: str, settings: RltrSettings) -> Trajectory:
    tools = data.get("tools") or []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise DataError(f"field 'tools[{index}]' must be an object", where=where, fix="give OpenAI tool schemas.")
    thinking = settings.rollout.thinking
    try:
        return Trajectory.from_messages(data["messages"], data.get("query"), tools=tools, prefilled_think=thinking)
    except DataError as error:
        raise DataError(error.problem, where=f"{where}, {error.where}", fix=error.fix) from None
