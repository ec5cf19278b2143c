"""One query, read from a row of the user's file; every field that is wrong is named."""

from __future__ import annotations

import difflib
import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rltr_verl.errors import DataError
from rltr_verl.judge.checklist import parse_needs
from rltr_verl.rows import mended

FIELDS = ("query", "id", "needs", "reference", "difficulty", "tools")
_OTHER_NAMES = {
    "question": "query",
    "prompt": "query",
    "input": "query",
    "text": "query",
    "answer": "reference",
    "ground_truth": "reference",
    "level": "difficulty",
    "tool_selection": "tools",
}


@dataclass(frozen=True)
class Query:
    """A query of the user: ``needs`` is JSON text; None stands for what the row does not say."""

    row: int
    query: str
    id: str | None = None
    needs: str | None = None
    reference: str | None = None
    difficulty: str | None = None
    tools: tuple[str, ...] | None = None


def read_query(row: Mapping[str, Any], number: int, where: str) -> tuple[Query | None, list[DataError]]:
    """The query of a row, or everything that is wrong with the row, one error a field.

    Args:
        row: the row; a field that is null, NaN or a blank text is one that the row does not have.
        number: the row's number in the file.
        where: file and row, for messages.
    """
    wrong = _unknown(row, where, "field")
    row = {name: value for name, value in row.items() if name == "query" or not _absent(value)}
    if "query" not in row:
        fix = f"add the query's text (fields here: {', '.join(sorted(map(str, row))) or 'none'})."
        wrong.append(DataError("no field 'query'", where=where, fix=fix))
    values: dict[str, Any] = {}
    for name, read in _READERS.items():
        if name in row:
            try:
                values[name] = read(row[name], f"{where}, field '{name}'")
            except DataError as error:
                wrong.append(error)
    if not wrong and values.get("tools") is not None:
        wrong += _needs_of_other_tools(values, where)
    return (None, wrong) if wrong else (Query(number, **values), [])


def check_fields(names: Iterable[str], where: str, what: str) -> None:
    """Raise DataError for columns that are not those of queries."""
    names = list(names)
    if "query" not in names:
        fix = f"name the column of the queries 'query' ({what}s here: {', '.join(names) or 'none'})."
        raise DataError(f"no {what} 'query'", where=where, fix=fix)
    for error in _unknown(names, where, what):
        raise error
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"{what} '{name}' stands twice", where=where, fix="remove one of them.")


def _unknown(names: Iterable[str], where: str, what: str) -> list[DataError]:
    return [
        DataError(f"unknown {what} '{name}'", where=where, fix=_rename(str(name)))
        for name in names
        if name not in FIELDS
    ]


def _absent(value: Any) -> bool:
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


def _rename(name: str) -> str:
    near = _OTHER_NAMES.get(name.lower()) or next(iter(difflib.get_close_matches(name.lower(), FIELDS, n=1)), None)
    hint = f"did you mean '{near}'? " if near else ""
    return f"{hint}known: {', '.join(FIELDS)}; leave it out with --ignore {name}."


def _query(value: Any, where: str) -> str:
    text = _text(value, where, "write the query as text.").strip("\ufeff \t\r\n")
    if not any(unicodedata.category(char)[0] in "LNPS" for char in text):
        raise DataError("is empty", where=where, fix="write the query, or remove the row.")
    return text


def _id(value: Any, where: str) -> str:
    return _label(value, where, "write a text or a whole number.")


def _needs(value: Any, where: str) -> str:
    """Needs as JSON text, in one form whatever the row gave; checked by the checklist's own reader."""
    fix = "write a list of needs (docs/data.md), [] if the query needs no tool; leave it out if you do not know them."
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"is not valid JSON ({error})", where=where, fix=fix) from None
    needs = parse_needs(value, where.rpartition(", field")[0])  # which names the field itself
    if needs is None:
        raise DataError("is null", where=where, fix=fix)
    found = [need.model_dump(exclude_unset=True, exclude_none=True) for need in needs]
    return mended(json.dumps(found, ensure_ascii=False))


def _reference(value: Any, where: str) -> str:
    fix = "write a text, a number or a list of texts."
    if isinstance(value, (list, tuple)):
        texts = [_label(item, f"{where}[{place}]", fix) for place, item in enumerate(value)]
        return json.dumps(texts, ensure_ascii=False)
    return _label(value, where, fix)


def _difficulty(value: Any, where: str) -> str:
    return _label(value, where, "write a text or a number.")


def _tools(value: Any, where: str) -> tuple[str, ...]:
    fix = 'write a list of names, ["search", "code"]; leave the field out where all tools may be used.'
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
        except (ValueError, RecursionError) as error:
            raise DataError(f"is not valid JSON ({error})", where=where, fix=fix) from None
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"is no list of tool names (given: {_short(value)})", where=where, fix=fix)
    names = tuple(_text(item, where, fix).strip() for item in value)
    if "" in names or len(set(names)) < len(names):
        raise DataError(f"names a tool twice or an empty one (given: {_short(value)})", where=where, fix=fix)
    return names


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "query": _query,
    "id": _id,
    "needs": _needs,
    "reference": _reference,
    "difficulty": _difficulty,
    "tools": _tools,
}


def _needs_of_other_tools(values: Mapping[str, Any], where: str) -> list[DataError]:
    """A need of a tool that the row may not use can never be met."""
    named = [need["tool"] for need in json.loads(values.get("needs") or "[]")]
    return [
        DataError(
            f"field 'needs[{place}].tool': '{tool}' is not in the row's 'tools'", where=where, fix="add it there."
        )
        for place, tool in enumerate(named)
        if tool not in values["tools"]
    ]


def _label(value: Any, where: str, fix: str) -> str:
    """Text of a text or a number; 3.0, as pandas writes a whole number next to empty cells, is 3."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        value = str(value)
    text = _text(value, where, fix).strip()
    if not text:
        raise DataError("is empty", where=where, fix=fix)
    return text


def _text(value: Any, where: str, fix: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"is no text (given: {_short(value)})", where=where, fix=fix)
    return mended(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
