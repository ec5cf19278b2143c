"""Rows survive parquet, pandas and verl's dataset; the cases by id from tests/cases/dataset.jsonl."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rltr_verl.errors import DataError
from rltr_verl.rows import mended, read_messages, read_rows, read_tools, stored_rows, to_table, without_none, write_rows

LINES = (Path(__file__).parent / "cases" / "dataset.jsonl").read_text(encoding="utf-8").splitlines()
CASES = {case["id"]: case["input"]["rows"] for case in map(json.loads, LINES)}
PRINTS_ALL = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"


TEXT = st.text(max_size=4)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def pruned(value):
    """What the writer says it keeps."""
    if isinstance(value, dict):
        kept = {key: pruned(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None} or None
    return [pruned(item) for item in value] if isinstance(value, list) else value


def there_and_back(tmp_path, rows) -> list[dict]:
    write_rows(tmp_path / "rows.parquet", rows)
    return list(read_rows(tmp_path / "rows.parquet"))


@pytest.fixture
def tokenizer(tiny_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = PRINTS_ALL
    return tokenizer


def test_every_case_is_here():
    assert set(CASES) == {"D01a", "D02a", "D02b", "D04a", "D06a", "D07a", "D07b"}


def test_d01a_lists_come_back_as_lists_from_pandas_too(tmp_path, tokenizer):
    (row,) = CASES["D01a"]
    plain = without_none(row)["messages"]
    assert there_and_back(tmp_path, [row])[0]["messages"] == plain
    of_pandas = pd.read_parquet(tmp_path / "rows.parquet").iloc[0]["messages"]
    assert not isinstance(of_pandas, list)
    messages = read_messages(of_pandas)
    assert messages == plain
    assert "null" not in tokenizer.apply_chat_template(messages, tools=[], tokenize=False)


def test_d02a_a_row_has_its_own_keys_only(tmp_path):
    assert there_and_back(tmp_path, CASES["D02a"]) == [{"arguments": {"query": "a"}}, {"arguments": {"code": "1"}}]


def test_d02b_a_schema_has_its_own_parameters_only(tmp_path, tokenizer):
    first, second = there_and_back(tmp_path, CASES["D02b"])
    tools = read_tools(first["tools"], "tools")
    assert tools == CASES["D02b"][0]["tools"] and second == CASES["D02b"][1]
    assert "null" not in tokenizer.apply_chat_template([{"role": "user", "content": "q"}], tools=tools, tokenize=False)
    raw = next(stored_rows(tmp_path / "rows.parquet"))["tools"]
    assert raw[0]["parameters"]["a"] is None and read_tools(raw, "tools") == tools


def test_d04a_an_empty_mapping_is_left_out(tmp_path):
    with pytest.raises(pa.ArrowException):
        pq.write_table(pa.Table.from_pylist(CASES["D04a"]), tmp_path / "plain.parquet")
    other = {"extra_info": {"index": 3, "tools_kwargs": {"search": {"create_kwargs": {}}, "code": {"timeout": 5}}}}
    rows = there_and_back(tmp_path, [*CASES["D04a"], other])
    assert rows == [{}, {"extra_info": {"index": 3, "tools_kwargs": {"code": {"timeout": 5}}}}]
    assert there_and_back(tmp_path, CASES["D04a"]) == [{}]


def test_d07a_d07b_nothing_where_a_mapping_is_expected(tmp_path):
    rows = there_and_back(tmp_path, [*CASES["D07a"], *CASES["D07b"]])
    assert rows == [{"extra_info": {"need_tools_kwargs": True}}, {}]
    assert there_and_back(tmp_path, CASES["D07b"]) == [{}]


@pytest.mark.parametrize(
    ("rows", "column"),
    [
        ([{"a": 1, "x": "text"}, {"a": 2, "x": 3}], "x"),
        ([{"y": {"query": "a"}}, {"y": {"query": ["a"]}}], "y"),
        ([{"z": 1 << 70}], "z"),
    ],
)
def test_what_parquet_cannot_store_is_named(tmp_path, rows, column):
    with pytest.raises(DataError, match=rf"column '{column}' cannot be stored.*JSON text"):
        write_rows(tmp_path / "rows.parquet", rows)
    assert list(tmp_path.iterdir()) == []


def test_lone_surrogates_are_replaced_and_pairs_joined(tmp_path):
    assert there_and_back(tmp_path, [{"a\ud800": ["b\udc00c", "😀"]}]) == [{"a\ufffd": ["b\ufffdc", "😀"]}]
    assert mended("\ud83d\ude00 巴黎") == "😀 巴黎"


def test_json_lines_end_at_line_feeds_only(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes('\ufeff{"a": "x\u2028y\u0085z"}\r\n\n{"a": null, "b": 1}'.encode())
    assert list(read_rows(file)) == [{"a": "x\u2028y\u0085z"}, {"b": 1}]
    file.write_text("[1]")
    with pytest.raises(DataError, match="row 1: a row must be a JSON object"):
        list(read_rows(file))
    with pytest.raises(DataError, match="cannot be read"):
        list(read_rows(tmp_path / "none.parquet"))


def test_a_given_schema_stays_whatever_the_rows_hold():
    schema = pa.schema({"a": pa.string(), "b": pa.list_(pa.string())})
    assert to_table([{"a": None}], schema).schema == schema


@given(st.lists(st.dictionaries(TEXT, VALUE, max_size=3), min_size=1, max_size=3))
def test_any_rows_come_back_as_they_were_or_are_refused(rows):
    rows = [{"index": place, **row} for place, row in enumerate(rows)]
    with tempfile.TemporaryDirectory() as folder, suppress(DataError):
        assert there_and_back(Path(folder), rows) == [pruned(row) for row in rows]
