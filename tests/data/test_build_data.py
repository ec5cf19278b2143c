"""Files of queries become verl's parquet: checked first, without repeats, split by seed, written whole."""

import json

import pyarrow.parquet as pq
import pytest

from rltr_verl.data import DataOptions, build_data, load_planner_prompt, load_planner_prompt_file
from rltr_verl.data.pool import folded
from rltr_verl.data.writing import SCHEMA
from rltr_verl.errors import ConfigError, DataError, DiskError
from rltr_verl.judge.checklist import parse_needs


def queries(path, *rows):
    rows = [{"query": row} if isinstance(row, str) else row for row in rows]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def many(path, count, **fields):
    return queries(path, *({"query": f"question {number}", **fields} for number in range(count)))


def rows(path):
    return pq.read_table(path).to_pylist()


def asked(path):
    return [row["extra_info"]["query"] for row in rows(path)]


def test_a_row_has_what_training_reads(tmp_path):
    needs = [{"tool": "search", "arguments": {"query": ["a"]}}, {"tool": "calc", "arguments": {"e": "-"}, "result": 4}]
    full = {"query": "q?", "id": 9, "needs": needs, "reference": 41, "difficulty": "hard", "tools": ["search", "calc"]}
    source = queries(tmp_path / "mine.jsonl", full, "巴黎的人口是多少？")
    build_data(source, tmp_path / "all.parquet")
    first, second = rows(tmp_path / "all.parquet")
    prompt = load_planner_prompt("en")
    assert first["data_source"] == "mine" and first["agent_name"] == "rltr_planner"
    assert first["prompt"] == [{"role": "system", "content": prompt.system}, {"role": "user", "content": "q?"}]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "41"}
    assert parse_needs(first["extra_info"].pop("needs"), "row") == parse_needs(needs, "row")
    assert first["extra_info"] == {
        "index": 1,
        "id": "9",
        "split": "train",
        "lang": "en",
        "query": "q?",
        "reference": "41",
        "difficulty": "hard",
        "prompt_version": prompt.version,
        "tool_selection": ["search", "calc"],
    }
    assert second["prompt"][0]["content"] == load_planner_prompt("zh").system
    assert second["extra_info"]["prompt_version"] == load_planner_prompt("zh").version
    assert second["extra_info"]["needs"] is None and second["reward_model"]["ground_truth"] == ""


def test_the_columns_do_not_depend_on_the_rows(tmp_path):
    build_data(queries(tmp_path / "a.jsonl", "q"), tmp_path / "a.parquet")
    build_data(many(tmp_path / "b.jsonl", 9, tools=["x"], needs=[], difficulty=1), tmp_path / "b.parquet")
    assert pq.read_schema(tmp_path / "a.parquet") == pq.read_schema(tmp_path / "b.parquet") == SCHEMA


def test_splits_share_no_query_and_depend_on_the_seed_alone(tmp_path):
    source = many(tmp_path / "q.jsonl", 200)
    summary = build_data(source, tmp_path / "a", DataOptions(seed=3))
    train, val = asked(tmp_path / "a" / "train.parquet"), asked(tmp_path / "a" / "val.parquet")
    assert len(val) == summary.count("queries", split="val") == 10 and len(train) == summary.count("queries") == 190
    assert not set(train) & set(val) and len(set(train) | set(val)) == 200
    assert {row["extra_info"]["split"] for row in rows(tmp_path / "a" / "val.parquet")} == {"val"}
    build_data(source, tmp_path / "b", DataOptions(seed=3))
    build_data(source, tmp_path / "c", DataOptions(seed=4))
    for name in ("train.parquet", "val.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert set(asked(tmp_path / "c" / "val.parquet")) != set(val)
    turned = queries(tmp_path / "turned.jsonl", *(f"question {number}" for number in reversed(range(200))))
    build_data(turned, tmp_path / "d", DataOptions(seed=3))
    assert set(asked(tmp_path / "d" / "val.parquet")) == set(val)


@pytest.mark.parametrize(
    ("count", "share", "val"), [(2, None, 1), (1, None, 0), (10, 0.5, 5), (10, 0.99, 9), (10, 0.0, 0)]
)
def test_how_many_validate(tmp_path, count, share, val):
    summary = build_data(many(tmp_path / "q.jsonl", count), tmp_path / "a", DataOptions(val_share=share))
    assert (summary.count("queries"), summary.count("queries", split="val")) == (count - val, val)
    assert (tmp_path / "a" / "val.parquet").exists() == ("val" in summary.files) == (val > 0)


def test_repeats_are_dropped_and_counted(tmp_path):
    given = ["How tall?", "How tall?", "how  TALL", "Ｈｏｗ\u200b tall？", "How small?", "C++?", "C"]
    summary = build_data(queries(tmp_path / "q.jsonl", *given), tmp_path / "a.parquet")
    assert asked(tmp_path / "a.parquet") == ["How tall?", "How small?", "C++?", "C"]
    assert summary.dropped == {"exact duplicate": 1, "near duplicate": 2} and summary.rows == 7


def test_what_near_duplicates_share():
    assert folded(" Ｗhat\tIS it ?!") == folded("what is it。") == "what is it"
    assert folded("???") == "???"
    assert folded("c#") != folded("c")


def test_validation_queries_of_their_own_are_not_trained_on(tmp_path):
    val = queries(tmp_path / "v.jsonl", "Question 3?", {"query": "other", "id": "0"})
    source = many(tmp_path / "q.jsonl", 5)
    summary = build_data(source, tmp_path / "a", DataOptions(val=val))
    assert asked(tmp_path / "a" / "val.parquet") == ["Question 3?", "other"]
    assert asked(tmp_path / "a" / "train.parquet") == [f"question {number}" for number in (0, 1, 2, 4)]
    assert summary.dropped == {"asked in val": 1} and summary.rows == 7


def test_all_bad_rows_are_told_and_nothing_is_written(tmp_path):
    bad = [{"query": "q", "ned": number} for number in range(30)]
    source = queries(tmp_path / "q.jsonl", "good", *bad)
    with pytest.raises(DataError) as caught:
        build_data(source, tmp_path / "out" / "a")
    lines = str(caught.value).splitlines()
    assert [f"row {number}:" in lines[number - 1] for number in range(2, 22)] == [True] * 20
    assert lines[21].strip() == "... and 10 more rows"
    assert lines[22] == "30 of 31 rows cannot be used, so nothing is written. Fix: correct them, then run it again."
    assert list(tmp_path.iterdir()) == [source]


def test_bad_rows_of_both_files_are_told_together(tmp_path):
    val, source = queries(tmp_path / "v.jsonl", {"query": 1}), queries(tmp_path / "q.jsonl", {"query": ""})
    with pytest.raises(DataError, match=r"(?s)v.jsonl, row 1, .*q.jsonl, row 1, .*2 of 2 rows"):
        build_data(source, tmp_path / "a", DataOptions(val=val))


def test_an_id_stands_for_one_query(tmp_path):
    same = {"query": "a", "id": "1"}
    build_data(queries(tmp_path / "q.jsonl", same, same, {"query": "b", "id": 2}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="row 2: field 'id': '1' is also that of row 1"):
        build_data(queries(tmp_path / "q.jsonl", same, {"query": "b", "id": 1}), tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("options", "out", "error", "message"),
    [
        (DataOptions(val_share=0.1), "a.parquet", ConfigError, "one file cannot hold two splits"),
        (DataOptions(val_share=1.0), "a", ConfigError, "1.0 is no share"),
        (DataOptions(max_prompt_tokens=9), "a", ConfigError, "--max-prompt-tokens: .*Fix: add --model"),
        (DataOptions(), "new.jsonl", ConfigError, "new.jsonl' is no parquet file"),
        (DataOptions(), "q.parquet", ConfigError, "would be replaced"),
        (DataOptions(), "there.parquet", DataError, "is there already.*--overwrite"),
        (DataOptions(), "there.parquet/a", DiskError, "cannot be written"),
    ],
)
def test_options_that_cannot_be_followed(tmp_path, options, out, error, message):
    queries(tmp_path / "q.jsonl", "q")
    build_data(tmp_path / "q.jsonl", tmp_path / "there.parquet")
    before = (tmp_path / "there.parquet").read_bytes()
    (tmp_path / "there.parquet").rename(tmp_path / "q.parquet")
    (tmp_path / "there.parquet").write_bytes(before)
    source = tmp_path / ("q.parquet" if out == "q.parquet" else "q.jsonl")
    with pytest.raises(error, match=message):
        build_data(source, tmp_path / out, options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.jsonl", "q.parquet", "there.parquet"]
    assert (tmp_path / "there.parquet").read_bytes() == before


def test_overwriting_leaves_no_older_split_behind(tmp_path):
    source = many(tmp_path / "q.jsonl", 10)
    build_data(source, tmp_path / "a")
    summary = build_data(source, tmp_path / "a", DataOptions(val_share=0, overwrite=True))
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["train.parquet"]
    assert len(asked(summary.files["train"])) == 10


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "q.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="q.jsonl: no query is left"):
        build_data(tmp_path / "q.jsonl", tmp_path / "a")
    with pytest.raises(DataError, match="q2.jsonl: no query is left"):
        source = queries(tmp_path / "q2.jsonl", "q")
        build_data(source, tmp_path / "a", DataOptions(val=queries(tmp_path / "v.jsonl", "Q")))


def test_prompts_of_the_users_own(tmp_path):
    (tmp_path / "mine.txt").write_text("Plan.\n=====\nAsked: $query")
    source, own = queries(tmp_path / "q.jsonl", "巴黎？", "q"), load_planner_prompt_file(tmp_path / "mine.txt")
    build_data(source, tmp_path / "a.parquet", DataOptions(prompt=own, name="mine", language="en"))
    for row in rows(tmp_path / "a.parquet"):
        assert row["prompt"][0]["content"] == "Plan." and row["prompt"][1]["content"].startswith("Asked: ")
        assert row["extra_info"]["prompt_version"] == own.version and row["extra_info"]["lang"] == "en"
        assert row["data_source"] == "mine"
    build_data(source, tmp_path / "b.parquet", DataOptions(no_prompt=True))
    for row in rows(tmp_path / "b.parquet"):
        assert row["prompt"] == [{"role": "user", "content": row["extra_info"]["query"]}]
        assert row["extra_info"]["prompt_version"] is None


def test_counts(tmp_path):
    levels = [{"query": f"q{number}", "difficulty": number % 14, "tools": ["a", "b"]} for number in range(28)]
    summary = build_data(queries(tmp_path / "q.jsonl", *levels), None, DataOptions(val_share=0))
    lines = dict((what, train) for what, train, _ in summary.lines())
    assert lines["queries"] == lines["language: en"] == lines["tools: a, b"] == 28
    assert lines["difficulty: 0"] == 2 and lines["difficulty: 2 others"] == 4
    assert summary.files == {}


def test_many_batches(tmp_path):
    summary = build_data(many(tmp_path / "q.jsonl", 9001), tmp_path / "a.parquet")
    assert asked(tmp_path / "a.parquet") == [f"question {number}" for number in range(9001)]
    assert summary.rows == summary.count("queries") == 9001
