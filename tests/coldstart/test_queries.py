"""Which rows of a file of queries are played, and what is said of the others."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rltr_verl.coldstart.queries import QueryOptions, read_queries
from rltr_verl.coldstart.work import Work
from rltr_verl.data import DataOptions, build_data, load_planner_prompt, prompt_messages
from rltr_verl.errors import DataError
from rltr_verl.rollout.turns import Planner
from tests.coldstart.sampling_kit import Kit, towns, write_queries
from tests.fakes.families import tokenizer_of


@pytest.fixture(scope="module")
def planner(tmp_path_factory):
    kit = Kit(tmp_path_factory.mktemp("kit"))
    return Planner.build(kit.settings(), tokenizer_of("qwen3"))


def all_of(store):
    return [store[place] for place in range(len(store))]


def test_a_raw_row_gets_the_prompt_of_rltr_data(planner, tmp_path):
    rows = [{"query": "Warm?", "id": 7, "difficulty": "hard", "tools": ["search"]}, {"query": "天气怎么样？"}]
    store, skipped = read_queries(write_queries(tmp_path / "q.jsonl", *rows), planner)
    english, chinese = all_of(store)
    assert list(english.prompt) == prompt_messages(load_planner_prompt("en"), "Warm?")
    assert list(chinese.prompt) == prompt_messages(load_planner_prompt("zh"), "天气怎么样？")
    assert english.id == "7" and chinese.id.startswith("q")
    info = {"index": 1, "id": "7", "split": "train", "lang": "en", "query": "Warm?", "difficulty": "hard"}
    assert english.info == {**info, "prompt_version": load_planner_prompt().version, "tool_selection": ["search"]}
    assert (skipped.rows, skipped.read, skipped.lines) == (0, 2, [])


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_verls_columns_give_the_same_queries_as_the_raw_file(planner, tmp_path, form):
    raw = write_queries(tmp_path / "q.jsonl", {"query": "a b", "tools": ["search"], "needs": []}, {"query": "c"})
    build_data(raw, tmp_path / "made.parquet", DataOptions())
    made = tmp_path / "made.parquet"
    if form == "jsonl":
        made = write_queries(tmp_path / "made.jsonl", *pq.read_table(made).to_pylist())
    first, second = (all_of(read_queries(path, planner)[0]) for path in (raw, made))
    assert [(query.id, query.prompt) for query in first] == [(query.id, query.prompt) for query in second]
    assert [first.info.get("tool_selection") for first in second] == [["search"], None]


BAD = {
    b'{"query": "caf\xe9"}': (None, "not UTF-8"),
    b'{"query": ': (None, "not valid JSON"),
    b"[1]": (None, "must be a JSON object"),
    b'{"id": "x"}': ("query", "no field 'query'"),
    b'{"query": 5}': ("query", "is no text"),
    b'{"query": null}': ("query", "is no text"),
    b'{"query": "  "}': ("query", "is empty"),
    b'{"query": "t1", "tools": ["serch"]}': ("tools", "no tool 'serch' (tools: search)"),
    b'{"query": "t2", "tools": 5}': ("tools", "is no list"),
    b'{"query": "t3", "needs": "{"}': ("needs", "is not valid JSON"),
    b'{"query": "t4", "difficulty": []}': ("difficulty", "is no text"),
    b'{"query": "t5", "qery": "x"}': ("qery", "unknown field 'qery'"),
    b'{"query": "%s"}' % (b"a b " * 250_000): ("query", "characters"),
    b'{"query": "%s"}' % (b"a b " * 3_000): ("query", "tokens, --max-prompt-tokens is 4096"),
    b'{"query": "another", "id": "t0"}': ("id", "is also that of row"),
    b'{"prompt": []}': ("prompt", "is no list of chat messages"),
    b'{"extra_info": {}}': ("prompt", "no 'prompt'"),
    b'{"prompt": ["x"]}': ("prompt", "no chat message"),
    b'{"prompt": [{"role": "user", "content": ""}]}': ("prompt", "no chat message"),
    b'{"prompt": [{"role": "system", "content": "x"}]}': ("prompt", "role 'user'"),
    b'{"prompt": [{"role": "user", "content": "z1"}], "extra_info": 3}': ("extra_info", "is no object"),
    b'{"prompt": [{"role": "user", "content": "z2"}], "extra_info": {"id": 3}}': ("extra_info.id", "is no text"),
    b'{"prompt": [{"role": "user", "content": "z3"}], "extra_info": {"tool_selection": ["no"]}}': (
        "extra_info.tool_selection",
        "no tool of this recipe",
    ),
    b'{"prompt": [{"role": "user", "content": "z4"}], "extra_info": {"needs": "{"}}': ("needs", "is not valid JSON"),
}


def test_each_bad_row_is_named_and_stops_no_other(planner, tmp_path):
    good = towns(len(BAD) + 1)
    rows = [row for pair in zip(good, BAD, strict=False) for row in pair] + good[-1:]
    store, skipped = read_queries(write_queries(tmp_path / "q.jsonl", *rows), planner)
    assert store.ids == [row["id"] for row in good]
    assert skipped.rows == len(BAD)
    by_line = {}
    for line in skipped.lines:
        by_line.setdefault(line["line"], []).append(line)
        assert line["fix"]
    for place, (field, reason) in enumerate(BAD.values()):
        found = by_line[2 * place + 2]
        assert any(line["field"] == field and reason in line["reason"] for line in found), (place, found)


def test_strict_refuses_everything_and_names_the_rows(planner, tmp_path):
    path = write_queries(tmp_path / "q.jsonl", *towns(1), b"{", b'{"query": "\xff"}')
    with pytest.raises(DataError) as caught:
        read_queries(path, planner, QueryOptions(strict=True))
    assert "row 2: not valid JSON" in str(caught.value) and "row 3: byte 12 is not UTF-8" in str(caught.value)
    assert "2 of 3 rows cannot be used" in str(caught.value)


def test_a_file_without_a_usable_row_is_refused_with_its_reasons(planner, tmp_path):
    with pytest.raises(DataError, match="row 1: no field 'query'"):
        read_queries(write_queries(tmp_path / "q.jsonl", {"id": "1"}), planner)
    with pytest.raises(DataError, match="the file holds no rows"):
        read_queries(write_queries(tmp_path / "q.jsonl"), planner)
    with pytest.raises(DataError, match="no such file"):
        read_queries(tmp_path / "none.jsonl", planner)


def test_repeated_queries_are_dropped_but_not_for_a_row_that_is_refused(planner, tmp_path):
    rows = [{"query": "a", "tools": ["none"]}, {"query": "A."}, {"query": "a"}, {"query": "b"}]
    store, skipped = read_queries(write_queries(tmp_path / "q.jsonl", *rows), planner)
    assert [query.info["query"] for query in all_of(store)] == ["A.", "b"]
    assert (skipped.repeated, skipped.rows) == (1, 1)


def test_csv_and_parquet_and_ignored_fields(planner, tmp_path):
    (tmp_path / "q.csv").write_text("query,note\na,x\nb,y\n")
    pq.write_table(pa.table({"query": ["a", "b"], "note": [1, 2]}), tmp_path / "q.parquet")
    options = QueryOptions(ignore=frozenset({"note"}))
    ids = {tuple(read_queries(tmp_path / name, planner, options)[0].ids) for name in ("q.csv", "q.parquet")}
    assert len(ids) == 1
    with pytest.raises(DataError, match="unknown column 'note'"):
        read_queries(tmp_path / "q.csv", planner)


def test_work_serves_all_queries_alike_and_leaves_out_what_is_final(planner, tmp_path):
    store, _ = read_queries(write_queries(tmp_path / "q.jsonl", *towns(3)), planner)
    tasks = list(Work(store, 2, seed=1).left({"t1/0"}))
    assert [task.id for task in tasks] == ["t0/0", "t2/0", "t0/1", "t1/1", "t2/1"]
    assert len({task.seed for task in tasks}) == 5
    again = {task.id: task.seed for task in Work(store, 3, seed=1).left(set())}
    assert all(again[task.id] == task.seed for task in tasks)
    assert tasks[0].info["query"] == "How warm is town 0?" and json.dumps(tasks[0].prompt)
