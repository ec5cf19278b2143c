"""The queries of a cold start: a raw file as ``rltr data`` takes it, or rows in verl's columns.

Every row is checked before the first request. A row that cannot be used is named with its line, field, reason and fix
and left out; it does not stop the others. What can be used waits in a scratch file, so that memory holds ids only.
"""

from __future__ import annotations

import json
import re
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltr_verl.coldstart.records import query_id
from rltr_verl.coldstart.samples import prompt_digest
from rltr_verl.coldstart.verl_rows import is_verl_file, is_verl_row, read_verl_row
from rltr_verl.data.build import DataOptions
from rltr_verl.data.pool import Problems, RowChecks, folded
from rltr_verl.data.query import Query, read_query
from rltr_verl.data.reading import Numbered, iter_rows
from rltr_verl.data.writing import data_row
from rltr_verl.errors import DataError
from rltr_verl.rows import read_rows, without_none

if TYPE_CHECKING:
    from rltr_verl.rollout.turns import Planner

_CHARS_A_TOKEN = 64
"""No tokenizer packs more of a text into a token on the average: what is longer is refused without being encoded."""
_SHOWN = 500
_FIELD = re.compile(r"(?:^|, )(?:unknown )?field '([^']+)'|^no '([^']+)'|^no field '([^']+)'")


@dataclass(frozen=True)
class StoredQuery:
    """One query: its id, the planner's chat messages and the row's ``extra_info``."""

    id: str
    prompt: tuple[Mapping[str, Any], ...]
    info: Mapping[str, Any]


class QueryStore:
    """The queries that can be used, in the order of their file; they lie in a scratch file, their ids in ``ids``."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the store
        self._starts = array("Q")
        self._prompts: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> StoredQuery:
        self._file.seek(self._starts[place])
        row = json.loads(self._file.readline())
        return StoredQuery(self.ids[place], tuple(row["prompt"]), row["info"])

    def add(self, prompt: Iterable[Mapping[str, Any]], info: Mapping[str, Any]) -> None:
        """Append a query."""
        messages, name = list(prompt), query_id(info)
        self._starts.append(self._file.seek(0, 2))
        self._file.write(json.dumps({"prompt": messages, "info": info}).encode() + b"\n")
        self.ids.append(name)
        self._prompts[name] = prompt_digest(messages, info)

    def digest(self, name: str) -> bytes | None:
        """:func:`rltr_verl.coldstart.samples.prompt_digest` of a query, None if there is no such query."""
        return self._prompts.get(name)


@dataclass
class Skipped:
    """Rows that are left out.

    Attributes:
        lines: one mapping for each problem: ``line``, ``field`` (None if it is not about one), ``reason``, ``fix``.
        rows: rows with a problem.
        read: rows of the file, blank lines left out.
        repeated: rows that ask what one before them asks.
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    rows: int = 0
    read: int = 0
    repeated: int = 0
    problems: Problems = field(default_factory=Problems, repr=False)

    def add(self, number: int, errors: list[DataError]) -> None:
        """Take note of one row."""
        self.rows += 1
        self.problems.add(errors)
        self.lines += [
            {"line": number, "field": _field_of(error), "reason": error.problem[:_SHOWN], "fix": error.fix[:_SHOWN]}
            for error in errors
        ]


@dataclass(frozen=True)
class QueryOptions:
    """How a file of queries is read.

    Attributes:
        strict: refuse the file if one row cannot be used.
        max_prompt_tokens: longest allowed prompt, tools included; as ``data.max_prompt_length`` of the training.
        ignore: fields of a raw file to leave out.
    """

    strict: bool = False
    max_prompt_tokens: int = 4096
    ignore: frozenset[str] = frozenset()


def read_queries(
    path: Path, planner: Planner, options: QueryOptions | None = None, advance: Callable[[int], None] = lambda _: None
) -> tuple[QueryStore, Skipped]:
    """The queries of a file that can be used, and the rows that cannot.

    Queries that stand there before (equal, or equal after NFKC and case folding, spaces and the closing mark aside)
    are dropped.

    Args:
        path: JSON lines, CSV or parquet: the fields :data:`rltr_verl.data.query.FIELDS`, which get the planner's prompt
            as ``rltr data`` gives it, or verl's columns with ``prompt``.
        planner: the tools and the chat template.
        advance: told of progress, see :func:`rltr_verl.data.reading.iter_rows`.

    Raises:
        DataError: the file as a whole cannot be read, no row is left, or ``strict`` and a row is wrong.
    """
    options = options or QueryOptions()
    store, skipped = QueryStore(), Skipped()
    intake = _Intake(path, planner, options)
    for number, row in _numbered(path, options.ignore, advance):
        skipped.read += 1
        found = [row] if isinstance(row, DataError) else intake.read(number, row)
        if isinstance(found, list):
            skipped.add(number, found)
        elif found is None:
            skipped.repeated += 1
        else:
            store.add(*found)
    _require(path, store, skipped, options.strict)
    return store, skipped


Usable = tuple[list[dict[str, Any]], dict[str, Any]]
"""Prompt and ``extra_info``."""


class _Intake:
    """Checks rows, each also beside those before it."""

    def __init__(self, path: Path, planner: Planner, options: QueryOptions) -> None:
        self._path, self._planner, self._limit = path, planner, options.max_prompt_tokens
        self._prompts = DataOptions()
        self._checks = RowChecks(planner, None, None)
        self._seen: set[bytes] = set()

    def read(self, number: int, row: dict[str, Any]) -> Usable | None | list[DataError]:
        """The row, None if it repeats one, or what is wrong with it."""
        where = f"{self._path}, row {number}"
        try:
            query, usable = self._verl(row, number, where) if is_verl_row(row) else self._raw(row, number, where)
            same = folded(query.query).encode()
            if same in self._seen:
                return None
            wrong = self._checks.check(query, where) or self._too_long(*usable, where)
        except _Wrong as error:
            return error.errors
        if not wrong:
            self._seen.add(same)
        return wrong or usable

    def _raw(self, row: dict[str, Any], number: int, where: str) -> tuple[Query, Usable]:
        query, wrong = read_query(row, number, where)
        if query is None:
            raise _Wrong(wrong)
        language, prompt = self._prompts.prompt_for(query.query)
        made = data_row(query, prompt, language=language, split="train", source=self._path.stem)
        return query, (made["prompt"], without_none(made["extra_info"]))

    def _verl(self, row: dict[str, Any], number: int, where: str) -> tuple[Query, Usable]:
        try:
            return read_verl_row(row, number, where, self._planner)
        except DataError as error:
            raise _Wrong([error]) from None

    def _too_long(self, prompt: list[dict[str, Any]], info: dict[str, Any], where: str) -> list[DataError]:
        limit, fix = self._limit, "shorten the query, show fewer tools, or raise --max-prompt-tokens."
        chars = sum(len(message["content"]) for message in prompt)
        if chars > _CHARS_A_TOKEN * limit:
            problem = f"field 'query': the prompt has {chars:,} characters, far more than {limit} tokens hold"
            return [DataError(problem, where=where, fix=fix)]
        shown = list(self._planner.shown(info).values())
        tokens = len(self._planner.template.rendered_ids(prompt, shown, open_turn=True))  # prompt_ids would keep them
        if tokens <= limit:
            return []
        problem = f"field 'query': the prompt has {tokens} tokens, --max-prompt-tokens is {limit}"
        return [DataError(problem, where=where, fix=fix)]


class _Wrong(Exception):
    """A row with problems."""

    def __init__(self, errors: list[DataError]) -> None:
        super().__init__(errors)
        self.errors = errors


def _numbered(path: Path, ignore: frozenset[str], advance: Callable[[int], None]) -> Iterator[Numbered]:
    if not is_verl_file(path):
        yield from iter_rows(path, ignore, advance)
        return
    for number, row in enumerate(read_rows(path), 1):
        advance(1)
        yield number, row


def _require(path: Path, store: QueryStore, skipped: Skipped, strict: bool) -> None:
    if strict or not len(store):
        skipped.problems.raise_if_any(skipped.read)
    if not len(store):
        raise DataError("the file holds no rows", where=str(path), fix="write at least one query.")


def _field_of(error: DataError) -> str | None:
    """The field that a message names, in its place or in its text."""
    for text in (error.problem, error.where.rpartition(", row ")[2]):
        if match := _FIELD.search(text):
            return next(filter(None, match.groups()))
    return None
