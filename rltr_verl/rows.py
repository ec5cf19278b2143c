"""How data rows are written and read; one reading for the preflight, the rollout and the cold start.

Parquet merges the structs of a column: every message and every tool schema gets the keys of all others, the missing
ones as None. A chat template that prints JSON would show them to the model. It cannot store a mapping without keys or
a column of different types at all, and pandas hands lists out as arrays.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltr_verl.errors import DataError, DiskError

if TYPE_CHECKING:
    import pyarrow as pa

_FORMS = "give verl parquet (or JSON lines); docs/data.md shows the columns."


def without_none(value: Any) -> Any:
    """``value`` as plain lists and dictionaries, with every key that is None removed; None inside a list is kept."""
    if isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if hasattr(value, "tolist"):  # what pandas makes of a list
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [without_none(item) for item in value]
    return value


def read_messages(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages as the chat template gets them: plain dictionaries, without the keys that parquet added."""
    return [without_none(message) for message in messages]


def read_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """OpenAI tool schemas from JSON text, which parquet keeps as it is, or from structs, without the None it added.

    Returns None where the row has no tools.

    Raises:
        DataError: not JSON, or not a list of objects.
    """
    fix = "write the tools' OpenAI schemas as JSON text: json.dumps(schemas)."
    try:
        tools = json.loads(value) if isinstance(value, str) else without_none(value)
    except ValueError as error:
        raise DataError(f"is not valid JSON ({error})", where=where, fix=fix) from None
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError("is not a list of tool schemas", where=where, fix=fix)
    return tools


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a parquet or JSON lines file, one by one, without the keys that parquet added as None.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object.
    """
    return map(without_none, stored_rows(path))


def stored_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows as verl's dataset gets them, None included. Raises as :func:`read_rows` does."""
    path = Path(path)
    try:
        yield from _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read ({error})", where=str(path), fix=_FORMS) from None


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as parquet so that :func:`read_rows` gives them back; the file appears complete or not at all.

    Keys without a value (None, an empty mapping) are left out, lone surrogates become U+FFFD.

    Raises:
        DataError: a column holds what parquet cannot store; names the column.
        DiskError: the file cannot be written.
    """
    import pyarrow.parquet as pq

    path = Path(path)
    table = to_table(rows, where=str(path))
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
            pq.write_table(table, Path(scratch) / path.name)
            os.replace(Path(scratch) / path.name, path)
    except OSError as error:
        fix = "choose another folder or free some space."
        raise DiskError(f"cannot be written ({error.strerror or error})", where=str(path), fix=fix) from None


def to_table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None = None, where: str = "rows") -> pa.Table:
    """Rows as a table. See :func:`write_rows`; with a ``schema`` the values are taken as they are."""
    import pyarrow as pa

    stored = rows if schema else [{mended(str(key)): _storable(value) for key, value in row.items()} for row in rows]
    names = schema.names if schema is not None else list(dict.fromkeys(key for row in stored for key in row))
    columns = []
    for name in names:
        values = [row.get(name) for row in stored]
        try:
            columns.append(pa.array(values, schema.field(name).type if schema is not None else None))
        except (pa.ArrowException, OverflowError) as error:
            fix = "write values of one type, or nested ones as JSON text (json.dumps)."
            problem = f"column '{name}' cannot be stored as parquet ({error})"
            raise DataError(problem, where=where, fix=fix) from None
    return pa.table(columns, names=names)


def mended(text: str) -> str:
    """``text`` with lone surrogates, which are no characters and cannot be written as UTF-8, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _storable(value: Any) -> Any:
    """What parquet can store; None for what holds nothing."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str):
        return mended(value)
    if isinstance(value, Mapping):
        kept = {mended(str(key)): _storable(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None} or None
    if isinstance(value, (list, tuple)):
        return [_storable(item) for item in value]
    return value


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=4096):
            yield from batch.to_pylist()


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    # Only a line feed ends a line: JSON may hold U+2028 and the like as they are.
    with path.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise DataError("a row must be a JSON object", where=f"{path}, row {number}", fix=_FORMS)
                yield row
