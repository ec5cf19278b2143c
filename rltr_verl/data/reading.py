"""The rows of a file of queries, as they stand in it: JSON lines, CSV or parquet."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from rltr_verl.data.query import check_fields
from rltr_verl.errors import DataError
from rltr_verl.rows import without_none

Row = dict[str, Any]
Numbered = tuple[int, Row | DataError]
"""Number of a row, counted from 1 (in a text file: of its line), and the row or what is wrong with it."""

_BATCH = 2048
_PANDAS_INDEX = "__index_level_"
_JSON = (".jsonl", ".json", ".ndjson")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_JSON_FORM = '{"query": "..."}'


def iter_rows(path: Path, ignore: frozenset[str], advance: Callable[[int], None]) -> Iterator[Numbered]:
    """Every row of the file, without the fields in ``ignore``; blank lines are skipped.

    Args:
        path: a file that ends in .jsonl, .json, .ndjson, .csv or .parquet.
        ignore: names of fields to leave out.
        advance: told how many more bytes of a text file or rows of a parquet file have been read.

    Raises:
        DataError: the file as a whole cannot be read, or its columns are not those of queries.
    """
    readers = {".csv": _csv_rows, ".parquet": _parquet_rows} | dict.fromkeys(_JSON, _json_rows)
    if path.suffix.lower() not in readers:
        fix = "give JSON lines (.jsonl), .csv or .parquet."
        raise DataError(f"files that end in '{path.suffix}' are not read", where=str(path), fix=fix)
    try:
        for number, row in readers[path.suffix.lower()](path, ignore, advance):
            if isinstance(row, dict):
                row = {key: value for key, value in row.items() if key not in ignore}
            yield number, row
    except FileNotFoundError:
        raise DataError("no such file", where=str(path), fix="check the path.") from None
    except (OSError, ValueError) as error:  # pyarrow raises both
        raise DataError(f"cannot be read ({error})", where=str(path), fix="check the file.") from None


def size_of(path: Path) -> int:
    """What :func:`iter_rows` will have told ``advance`` in the end; 0 if the file cannot be read."""
    try:
        return _parquet(path).metadata.num_rows if path.suffix.lower() == ".parquet" else path.stat().st_size
    except (OSError, DataError):
        return 0


def _lines(path: Path, advance: Callable[[int], None]) -> Iterator[tuple[int, str | DataError]]:
    """Lines that are not blank. Only a line feed ends a line: JSON may hold U+2028 and the like as they are."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            advance(len(raw))
            line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            try:
                text: str | DataError = line.decode()
            except UnicodeDecodeError as error:
                where, fix = f"{path}, row {number}", "save the file as UTF-8."
                text = DataError(f"byte {error.start + 1} is not UTF-8", where=where, fix=fix)
                if number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    raise DataError("the file is UTF-16", where=str(path), fix=fix) from None
            if isinstance(text, DataError) or text.strip():
                yield number, text


def _json_rows(path: Path, ignore: frozenset[str], advance: Callable[[int], None]) -> Iterator[Numbered]:
    for number, line in _lines(path, advance):
        yield number, line if isinstance(line, DataError) else _json_row(line, f"{path}, row {number}")


def _json_row(line: str, where: str) -> Row | DataError:
    fix = f"write one object a line, such as {_JSON_FORM}."
    try:
        row = _DECODER.decode(line.strip())
    except (ValueError, RecursionError) as error:
        return DataError(f"not valid JSON ({error})", where=where, fix=fix)
    if not isinstance(row, dict):
        return DataError(f"a row must be a JSON object, not {type(row).__name__}", where=where, fix=fix)
    return row


def _no_duplicates(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key '{next(name for name in names if names.count(name) > 1)}' stands twice")
    return row


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def _csv_rows(path: Path, ignore: frozenset[str], advance: Callable[[int], None]) -> Iterator[Numbered]:
    # A byte that is not UTF-8 spoils its row only: it becomes a lone surrogate, which `_csv_row` refuses.
    with path.open("rb") as raw, io.TextIOWrapper(raw, "utf-8-sig", errors="surrogateescape", newline="") as text:
        table = csv.reader(text, strict=True)
        names = [name.strip() for name in _next(table, path, 1) or []]
        done, line = 0, table.line_num
        check_fields([name for name in names if name not in ignore], str(path), "column")
        while (cells := _next(table, path, line + 1)) is not None:
            first, line = line + 1, table.line_num
            advance(raw.tell() - done)
            done = raw.tell()
            if any(cells):
                yield first, _csv_row(names, cells, f"{path}, row {first}")


def _next(table: Any, path: Path, row: int) -> list[str] | None:
    """The cells of the row that begins in line ``row``, None behind the last one."""
    try:
        return next(table, None)
    except (csv.Error, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):  # it is raised for a whole block of the file
            row = next((number for number, line in _lines(path, lambda _: None) if isinstance(line, DataError)), row)
        where, fix = f"{path}, row {row}", "save it as UTF-8 CSV with commas and double quotes."
        raise DataError(f"not readable as CSV ({error})", where=where, fix=fix) from None


def _csv_row(names: list[str], cells: list[str], where: str) -> Row | DataError:
    if len(cells) != len(names):
        fix = "put texts with commas or line breaks between double quotes."
        return DataError(f"{len(cells)} cells, but {len(names)} columns", where=where, fix=fix)
    for name, cell in zip(names, cells, strict=True):
        if _NOT_UTF8.search(cell):
            problem = f"field '{name}': holds a byte that is not UTF-8"
            return DataError(problem, where=where, fix="save the file as UTF-8.")
    return {name: cell for name, cell in zip(names, cells, strict=True)}


def _parquet_rows(path: Path, ignore: frozenset[str], advance: Callable[[int], None]) -> Iterator[Numbered]:
    with _parquet(path) as file:
        names = [name for name in file.schema_arrow.names if name not in ignore and not name.startswith(_PANDAS_INDEX)]
        check_fields(names, str(path), "column")
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH, columns=names):
            advance(batch.num_rows)
            for row in batch.to_pylist():
                number += 1
                yield number, without_none(row)


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise DataError(f"not a parquet file ({error})", where=str(path), fix="give another file.") from None
