"""Checker without a model: a row's information needs against the trajectory's successful calls.

A need names a tool, pieces of text that its arguments must hold and, optionally, a result that the observation must
show: ``{"tool": "search", "arguments": {"query": ["arlen", "temperature"]}, "result": "41"}``. It is met by a call of
that tool with status ok in which every piece occurs. A result that the observation merely repeats from the call's own
arguments is not shown: the policy may have made it up. Text is compared after NFKC and case folding. An empty list says
that the query needs no tool.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rltr_verl.errors import DataError, Unscored
from rltr_verl.judge.base import Checker, Vote, Votes
from rltr_verl.trajectory import ExecutedCall, Status, Trajectory

Credit = Literal["all", "fraction"]
_FORM = '{"tool": "search", "arguments": {"query": ["arlen", "temperature"]}, "result": "41"}'


class Need(BaseModel):
    """One piece of information that the query cannot be answered without."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    tool: str = Field(min_length=1)
    arguments: dict[str, tuple[str, ...] | str] = Field(default_factory=dict)
    result: str | None = None

    def met_by(self, item: ExecutedCall) -> bool:
        """Whether this call succeeded, carries every piece, and shows the result where one is given."""
        if item.status is not Status.OK or item.call.name != self.tool or item.call.arguments is None:
            return False
        given = item.call.arguments
        carried = all(name in given and _holds(given[name], pieces) for name, pieces in self.arguments.items())
        return carried and (self.result is None or self._shown(item.observation.text, given, self.result))

    def _shown(self, text: str, given: Mapping[str, Any], result: str) -> bool:
        if not shows(text, result):
            return False
        needed = {_fold(piece) for pieces in self.arguments.values() for piece in _pieces(pieces)}
        echoed = {_fold(value) for value in _texts(given) if shows(value, result)} - needed
        rest = _fold(text)
        for value in sorted(echoed, key=len, reverse=True):
            rest = rest.replace(value, " ")
        return shows(rest, result)


class ChecklistChecker(Checker):
    """One deterministic vote: 1 if every need is met (credit ``all``), or the share of needs met (``fraction``)."""

    def __init__(self, credit: Credit = "all") -> None:
        self.credit = credit

    async def check(self, trajectory: Trajectory, row: Mapping[str, Any]) -> Votes:
        """See :class:`Checker`; raises Unscored for a row without ``needs``."""
        where = f"row {row.get('index', row.get('id', '?'))}"
        needs = parse_needs(row.get("needs"), where)
        if needs is None:
            fix = "add the field, or let a language model judge: judge.backend=endpoint with base_url and model."
            raise Unscored("the row has no 'needs', which the checklist checker compares with", where=where, fix=fix)
        calls = list(trajectory.executed())
        met = [any(need.met_by(item) for item in calls) for need in needs]
        share = sum(met) / len(met) if met else 1.0
        verdict = float(all(met)) if self.credit == "all" else share
        return Votes((Vote(verdict),), {"needs_met": met})


def parse_needs(value: Any, where: str) -> tuple[Need, ...] | None:
    """Needs from a list or from the JSON text of one; None stays None (the row has none).

    Args:
        value: the row's field ``needs``.
        where: file and row, for the message.

    Raises:
        DataError: another type, unreadable JSON, a need with an unknown or missing key; names the field.
    """
    if value is None:
        return None
    try:
        return _parsed(value) if isinstance(value, str) else _NEEDS.validate_python(value)
    except json.JSONDecodeError as error:
        raise DataError(f"field 'needs' is not valid JSON ({error})", where=where, fix=_fix()) from None
    except ValidationError as error:
        first = error.errors()[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        problem = (
            f"field 'needs{path}': {first['msg'].lower().replace('tuple', 'list')} (given: {_short(first['input'])})"
        )
        raise DataError(problem, where=where, fix=_fix()) from None


def shows(text: str, result: str) -> bool:
    """Whether ``result`` stands in ``text`` as a token of its own: 41 is not shown by 410, 41.5, 1,041 or -41."""
    pattern = re.escape(_fold(result))
    ends = r"(?<![0-9a-z_])(?<!\d[.,])(?<![^0-9a-z]-)" + pattern + r"(?![0-9a-z_])(?![.,]\d)"
    return re.search(ends, " " + _fold(text)) is not None


_NEEDS = TypeAdapter(tuple[Need, ...])


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[Need, ...]:
    return _NEEDS.validate_python(json.loads(text))


def _holds(argument: Any, pieces: tuple[str, ...] | str) -> bool:
    text = _fold(argument if isinstance(argument, str) else json.dumps(argument, ensure_ascii=False))
    return all(_fold(piece) in text for piece in _pieces(pieces))


def _pieces(pieces: tuple[str, ...] | str) -> tuple[str, ...]:
    return (pieces,) if isinstance(pieces, str) else pieces


def _texts(value: Any) -> Iterator[str]:
    """Every string in an argument, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for item in value.values() for text in _texts(item))
    elif isinstance(value, (list, tuple)):
        yield from (text for item in value for text in _texts(item))


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _fix() -> str:
    return f"write a list of needs (or its JSON text) such as [{_FORM}], or [] if the query needs no tool."


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
