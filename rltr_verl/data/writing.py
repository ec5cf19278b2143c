"""Rows as verl reads them, written piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rltr_verl.data.prompt_files import prompt_messages
from rltr_verl.data.query import Query
from rltr_verl.judge.prompt_files import PromptPack
from rltr_verl.rows import to_table

AGENT_NAME = "rltr_planner"
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "agent_name": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct(
            {
                "index": pa.int64(),
                **dict.fromkeys(
                    ("id", "split", "lang", "query", "needs", "reference", "difficulty", "prompt_version"), pa.string()
                ),
                "tool_selection": pa.list_(pa.string()),
            }
        ),
    }
)
"""Columns of every file that is written: the same whatever the rows hold, so that files can be trained on together."""

_BATCH = 4096


def data_row(query: Query, prompt: PromptPack | None, *, language: str, split: str, source: str) -> dict[str, Any]:
    """A query as a row of verl's RL parquet, in the columns of :data:`SCHEMA`."""
    info = {
        "index": query.row,
        "id": query.id,
        "split": split,
        "lang": language,
        "query": query.query,
        "needs": query.needs,
        "reference": query.reference,
        "difficulty": query.difficulty,
        "prompt_version": prompt.version if prompt else None,
        "tool_selection": list(query.tools) if query.tools else None,
    }
    return {
        "data_source": source,
        "prompt": prompt_messages(prompt, query.query),
        "agent_name": AGENT_NAME,
        "reward_model": {"style": "rule", "ground_truth": query.reference or ""},
        "extra_info": info,
    }


class ParquetFileWriter:
    """A parquet file that is written in batches, so that memory does not grow with its rows."""

    def __init__(self, path: Path, schema: pa.Schema = SCHEMA) -> None:
        self._writer, self._schema = pq.ParquetWriter(path, schema), schema
        self._rows: list[Mapping[str, Any]] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        self._rows.append(row)
        if len(self._rows) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(to_table(self._rows, self._schema))
        self._rows = []

    def __enter__(self) -> ParquetFileWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._rows:
            self._flush()
        self._writer.close()
