"""Conversations as parquet, written as they come; a file appears complete or not at all.

``messages`` are structs of role and content and nothing else, so parquet adds no keys. ``tools_json`` holds the tools'
schemas as JSON text, which is exact and which :class:`PlannerSFTDataset` reads. ``tools`` holds them as structs, which
verl's own dataset needs: there parquet gives every tool the parameters of all others, as null.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rltr_verl.errors import DiskError
from rltr_verl.rows import mended, without_none

_BATCH = 256
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_COLUMNS = [
    ("messages", _MESSAGES),
    ("tools", pa.string()),
    ("tools_json", pa.string()),
    ("id", pa.string()),
    ("query_id", pa.string()),
    ("score", pa.float64()),
    ("difficulty", pa.string()),
    ("loss", pa.string()),
    ("tool_selection", pa.list_(pa.string())),
]
_TOOLS = ("tools", "tools_json")


def tools_type(tools: Sequence[list[dict[str, Any]]]) -> pa.DataType | None:
    """The type of a column that holds these lists of schemas as structs; None where parquet cannot hold them.

    Not held: values of several types under one key, mappings without keys, and no tools at all.
    """
    try:
        column = pa.array(tools)
    except (pa.ArrowException, OverflowError):
        return None
    fits = column.to_pylist() != [] and not _has_empty(column.type) and without_none(column.to_pylist()) == tools
    return column.type if fits else None


def _has_empty(kind: pa.DataType) -> bool:
    """Whether a struct without fields, or a column of nothing, is in a type."""
    if pa.types.is_struct(kind):
        return kind.num_fields == 0 or any(_has_empty(field.type) for field in kind)
    return _has_empty(kind.value_type) if pa.types.is_list(kind) else bool(pa.types.is_null(kind))


class RowFile:
    """One parquet file, in batches.

    Args:
        path: of the file; an older one stays until :meth:`finish`.
        tools: type of the column ``tools``; None writes JSON text there.
        has_tools: whether there are the columns ``tools`` and ``tools_json`` at all.

    Raises:
        DiskError: the file cannot be written.
    """

    def __init__(self, path: Path, tools: pa.DataType | None = None, *, has_tools: bool = True) -> None:
        self.path, self._typed = path, tools is not None
        kinds = {**dict(_COLUMNS), "tools": tools or pa.string()}
        self._schema = pa.schema([item for item in kinds.items() if has_tools or item[0] not in _TOOLS])
        self._part = path.with_name(f".{path.name}.{os.getpid()}")
        self._rows: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; lone surrogates become U+FFFD."""
        tools = row["tools"] or None
        text = mended(json.dumps(tools, ensure_ascii=False)) if tools else None
        messages = [{key: mended(value) for key, value in message.items()} for message in row["messages"]]
        shown = tools if self._typed else text
        self._rows.append({**row, "messages": messages, "tools": shown, "tools_json": text})
        if len(self._rows) >= _BATCH:
            self._flush()

    def finish(self) -> bool:
        """Put the file in its place; False, and no file, if no row was added."""
        self._flush()
        try:
            if self._writer is None:
                self.path.unlink(missing_ok=True)
                return False
            self._writer.close()
            os.replace(self._part, self.path)
        except OSError as error:
            raise self._unwritable(error) from None
        return True

    def discard(self) -> None:
        """Leave everything as it was."""
        if self._writer is not None:
            self._writer.close()
            self._part.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._rows:
            return
        try:
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._part, self._schema)
            rows = [{name: row[name] for name in self._schema.names} for row in self._rows]
            self._writer.write_table(pa.Table.from_pylist(rows, schema=self._schema))
        except OSError as error:
            raise self._unwritable(error) from None
        self._rows = []

    def _unwritable(self, error: OSError) -> DiskError:
        fix = "choose another folder or free some space."
        return DiskError(f"cannot be written ({error.strerror or error})", where=str(self.path), fix=fix)
