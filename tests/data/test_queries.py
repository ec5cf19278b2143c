"""Files of queries in every form: what is read, and how what is wrong is named."""

import json
import re

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltr_verl.data.pool import checked_rows
from rltr_verl.data.query import FIELDS, Query, read_query
from rltr_verl.data.reading import size_of
from rltr_verl.errors import DataError

NEEDS = [{"tool": "search", "arguments": {"query": ["a"]}}, {"tool": "calc", "arguments": {"expression": "-"}}]


def read(path, ignore=()) -> tuple[list[Query], list[str]]:
    rows = list(checked_rows(path, frozenset(ignore), lambda count: None))
    return [query for _, query, _ in rows if query], [str(error) for *_, errors in rows for error in errors]


def of_text(tmp_path, content, name="q.jsonl", ignore=()):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read(path, ignore)


def one(row) -> tuple[Query | None, str]:
    query, errors = read_query(row, 7, "f.jsonl, row 7")
    return query, " | ".join(map(str, errors))


def test_all_fields():
    row = {"query": " q? ", "id": 3, "needs": NEEDS, "reference": 41, "difficulty": 2.0, "tools": ["search", "calc"]}
    query, errors = one(row)
    assert not errors
    assert query == Query(7, "q?", "3", json.dumps(NEEDS), "41", "2", ("search", "calc"))
    assert one({"query": "q", "needs": json.dumps(NEEDS)})[0].needs == query.needs
    assert one({"query": "q", "tools": "search, calc"})[0].tools == ("search", "calc")
    assert one({"query": "q", "tools": '["search"]'})[0].tools == ("search",)
    assert one({"query": "q", "reference": ["a", 1]})[0].reference == '["a", "1"]'
    assert one({"query": "q"})[0] == Query(7, "q")
    assert one({"query": "q", "id": None, "reference": " ", "needs": "", "difficulty": float("nan")})[0] == Query(
        7, "q"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "f.jsonl, row 7: no field 'query'.*fields here: none"),
        ({"question": "q"}, "row 7: unknown field 'question'. Fix: did you mean 'query'"),
        ({"query": "q", "dificulty": 1}, "did you mean 'difficulty'.*--ignore dificulty"),
        ({"query": "q", "zzz": 1}, "unknown field 'zzz'. Fix: known: query, id"),
        ({"query": 3}, r"row 7, field 'query': is no text \(given: 3\)"),
        ({"query": ["q"]}, "field 'query': is no text"),
        ({"query": " \u200b\n"}, "field 'query': is empty"),
        ({"query": "q", "id": True}, "field 'id': is no text"),
        ({"query": "q", "id": {"a": 1}}, "field 'id': is no text"),
        ({"query": "q", "reference": ["a", " "]}, r"field 'reference'\[1\]: is empty"),
        ({"query": None}, "field 'query': is no text .given: None"),
        ({"query": "q", "note": None}, "unknown field 'note'"),
        ({"query": "q", "reference": ["a", None]}, r"field 'reference'\[1\]: is no text"),
        ({"query": "q", "difficulty": [1]}, "field 'difficulty': is no text"),
        ({"query": "q", "difficulty": float("inf")}, "field 'difficulty': is no text"),
        ({"query": "q", "needs": "[{"}, "field 'needs': is not valid JSON"),
        ({"query": "q", "needs": "[" * 9999}, "field 'needs': is not valid JSON"),
        ({"query": "q", "needs": "null"}, "field 'needs': is null"),
        ({"query": "q", "needs": [{"tol": "x"}]}, r"row 7: field 'needs\[0\]"),
        ({"query": "q", "needs": {"tool": "x"}}, "row 7: field 'needs'"),
        ({"query": "q", "tools": []}, "field 'tools': is no list of tool names.*leave the field out"),
        ({"query": "q", "tools": ["a", "a"]}, "field 'tools': names a tool twice"),
        ({"query": "q", "tools": [1]}, "field 'tools': is no text"),
        ({"query": "q", "tools": "[1"}, "field 'tools': is not valid JSON"),
        ({"query": "q", "tools": ["calc"], "needs": NEEDS}, r"needs\[0\].tool': 'search' is not in the row's 'tools'"),
        ({"query": 3, "ned": 1, "tools": 5}, "unknown field 'ned'.*field 'query'.*field 'tools'"),
    ],
)
def test_what_is_wrong_is_named_by_field(row, message):
    query, errors = one(row)
    assert query is None
    assert re.search(message, errors), errors


def test_text_that_is_no_character_is_replaced_everywhere(tmp_path):
    line = r'{"query": "a\ud83d b \ud83d\ude00", "needs": [{"tool": "s", "result": "x\udc00"}], "id": "\ud800"}'
    (query,), errors = of_text(tmp_path, line)
    assert (query.query, query.id) == ("a\ufffd b 😀", "\ufffd") and not errors
    assert json.loads(query.needs)[0]["result"] == "x\ufffd"


def test_byte_order_mark_carriage_returns_blank_lines_and_line_separators(tmp_path):
    text = '\ufeff{"query": "a\u2028b"}\r\n\r\n   \n{"query": "c", "id": null}'
    queries, errors = of_text(tmp_path, text)
    assert [(query.row, query.query, query.id) for query in queries] == [(1, "a\u2028b", None), (4, "c", None)]
    assert not errors


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'query': 1}", "row 2: not valid JSON"),
        (b'["q"]', "row 2: a row must be a JSON object, not list"),
        (b'{"query": "\xff"}', "row 2: byte 12 is not UTF-8"),
        (b'{"query": NaN}', "row 2: not valid JSON (NaN is no JSON"),
        (b'{"query": "a", "query": "b"}', "row 2: not valid JSON (key 'query' stands twice"),
        (b"[" * 100_000, "row 2: not valid JSON"),
        (b'{"query": "q", "id": ' + b"9" * 5000 + b"}", "row 2: not valid JSON"),
    ],
)
def test_lines_that_are_no_rows(tmp_path, line, message):
    queries, errors = of_text(tmp_path, b'{"query": "a"}\n' + line + b'\n{"query": "c"}\n')
    assert [query.query for query in queries] == ["a", "c"]
    assert len(errors) == 1 and message in errors[0]


def test_csv(tmp_path):
    head = "\ufeffquery, id,needs,tools,note\r\n"
    body = '"a, ""b""\nc",1,,"search,calc",x\r\n\r\n,,,,\r\nd,2,"[{""tool"": ""s""}]",,y\r\ne,3\r\n'
    queries, errors = of_text(tmp_path, head + body, "q.csv", ["note"])
    assert queries == [
        Query(2, 'a, "b"\nc', "1", tools=("search", "calc")),
        Query(6, "d", "2", '[{"tool": "s"}]'),
    ]
    assert len(errors) == 1 and "q.csv, row 7: 2 cells, but 5 columns" in errors[0]


def test_parquet_from_pandas(tmp_path):
    rows = [
        {"query": "a", "needs": NEEDS, "difficulty": 3, "tools": ["search", "calc"], "extra": 1},
        {"query": "b", "needs": None, "difficulty": None, "tools": None, "extra": 1},
    ]
    pd.DataFrame(rows, index=["x", "y"]).to_parquet(tmp_path / "q.parquet")
    queries, errors = read(tmp_path / "q.parquet", ["extra"])
    assert queries == [Query(1, "a", None, json.dumps(NEEDS), None, "3", ("search", "calc")), Query(2, "b")]
    assert not errors and size_of(tmp_path / "q.parquet") == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.txt", b"x", "files that end in '.txt' are not read"),
        ("q.csv", b"", "(columns here: none)"),
        ("q.csv", b"question;id\nx;1\n", "no column 'query'"),
        ("q.csv", b"query,query\nx,y\n", "column 'query' stands twice"),
        ("q.csv", b"query,ned\nx,y\n", "unknown column 'ned'. Fix: did you mean 'needs'"),
        ("q.csv", b'query\nx\n"a\nb\n', "row 3: not readable as CSV"),
        ("q.csv", b"query\nx\n" + b"y" * 140_000, "row 3: not readable as CSV (field larger"),
        ("q.parquet", b"PAR1 no", "not a parquet file"),
        ("q.jsonl", '{"query": "q"}'.encode("utf-16"), "the file is UTF-16"),
        ("none.jsonl", None, "no such file"),
        ("none.parquet", None, "no such file"),
    ],
)
def test_files_that_cannot_be_read_as_a_whole(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name)
    assert message in str(caught.value) and caught.value.fix and name in caught.value.where


def test_a_byte_that_is_no_text_spoils_its_row_only(tmp_path):
    path = tmp_path / "q.csv"
    path.write_bytes(b"query\nx\n\xff\ny\n")
    rows = list(checked_rows(path, frozenset(), lambda _: None))
    assert [query.query for _, query, _ in rows if query] == ["x", "y"]
    (error,) = [error for _, _, errors in rows for error in errors]
    assert "row 3" in error.where and "field 'query': holds a byte that is not UTF-8" in str(error)


def test_parquet_whose_text_is_no_text(tmp_path):
    buffers = [pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    pq.write_table(pa.table({"query": pa.StringArray.from_buffers(1, *buffers)}), tmp_path / "q.parquet")
    with pytest.raises(DataError, match="q.parquet: cannot be read"):
        read(tmp_path / "q.parquet")


def test_progress_adds_up(tmp_path):
    for name, text in (("q.jsonl", '{"query": "a"}\n\n{"query": "b"}'), ("q.csv", "query\na\nb\n")):
        path, steps = tmp_path / name, []
        path.write_text(text)
        list(checked_rows(path, frozenset(), steps.append))
        assert sum(steps) == size_of(path) == len(text)
    assert size_of(tmp_path / "none.jsonl") == 0


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=5)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(FIELDS), ANY), ANY_TEXT)
def test_any_row_gives_a_query_that_can_be_written_or_says_why_not(row, text):
    for given_row in (row, {**row, "query": text}):
        query, errors = read_query(given_row, 1, "file, row 1")
        assert (query is None) == bool(errors) and all(error.fix for error in errors)
        for value in vars(query).values() if query else ():
            assert not isinstance(value, str) or value.encode()
