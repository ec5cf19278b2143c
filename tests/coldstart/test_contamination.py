"""Exact and near duplicates of held-out queries, compared with the definition computed pair by pair."""

import json

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltr_verl.coldstart.contamination import NGRAM, HeldOut
from rltr_verl.data.pool import folded
from rltr_verl.errors import DataError

WORDS = ["arlen", "brona", "temperature", "of", "the", "气温", "阿伦", "多少", "41", "43", "?"]
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(" ".join)


def grams(text):
    text = folded(text)
    return {text[start : start + NGRAM] for start in range(len(text) - NGRAM + 1)}


def jaccard(one, other):
    both = grams(one) | grams(other)
    return len(grams(one) & grams(other)) / len(both) if both else 0.0


def index(*queries, near=0.8):
    found = HeldOut(near)
    for number, query in enumerate(queries, 1):
        found.add(query, f"row {number}")
    return found


@settings(max_examples=400)
@given(st.lists(texts, max_size=12), texts, st.sampled_from([0.3, 0.5, 0.8, 0.9, 1.0]))
def test_the_index_finds_what_a_comparison_of_all_pairs_finds(queries, query, near):
    match = index(*queries, near=near).match(query)
    if folded(query) in map(folded, queries):
        assert match.kind == "exact"
        return
    best = max((jaccard(query, other) for other in queries), default=0.0)
    if best < near or not grams(query):
        assert match is None
    else:
        assert match.kind == "near" and match.similarity == best == jaccard(query, match.text)


def test_exact_after_folding():
    held_out = index("How warm is Arlen?", "阿伦的气温是多少？")
    for query in ("how  warm is ARLEN", "How warm is Arlen?!", "阿伦的气温是多少"):
        assert held_out.match(query).kind == "exact"
    assert held_out.match("How warm is Arlen?").where == "row 1"


def test_a_word_more_or_less_is_near():
    held_out = index(
        "What is the temperature difference between Arlen and Brona today?", "请问阿伦和布罗纳今天的气温差是多少度呢"
    )
    english = held_out.match("What is the temperature difference between Arlen and Brona?")
    chinese = held_out.match("请问阿伦和布罗纳今天的气温差是多少度")
    assert (english.kind, english.where) == ("near", "row 1") and english.similarity > 0.8
    assert (chinese.kind, chinese.where) == ("near", "row 2")
    assert held_out.match("Write a sonnet about the sea.") is None


def test_a_template_with_another_place_falls_on_either_side_by_its_length():
    """Stated in docs/coldstart.md: the similarity of two fillings of one template grows with the template."""
    held_out = index("How warm is Arlen?", "How much higher is the population of Corvik than that of Mirava?")
    assert held_out.match("How warm is Brona?") is None
    assert held_out.match("How much higher is the population of Corvik than that of Eskel?").kind == "near"


def test_short_texts_are_compared_exactly_only():
    held_out = index("ab", "Hi")
    assert held_out.match("AB").kind == "exact" and held_out.match("ac") is None


def test_the_first_of_equal_rows_is_named():
    match = index("How warm is Arlen?", "how warm is arlen").match("How warm is Arlen")
    assert match.where == "row 1" and len(index("a", "A")) == 1


def test_a_match_names_the_row_and_the_start_of_its_text():
    shown = str(index("x" * 500).match("x" * 500))
    assert shown == f"exact 1.00: row 1: {'x' * 57}..."


@pytest.fixture
def files(tmp_path):
    row = {"query": "How warm is Arlen?", "id": "v1", "anything": 3}
    (tmp_path / "val.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps({"query": "阿伦的气温"}) + "\n", "utf-8")
    pd.DataFrame([row]).to_csv(tmp_path / "val.csv", index=False)
    pd.DataFrame([row]).to_parquet(tmp_path / "plain.parquet")
    verl = {"prompt": [{"role": "user", "content": "Plan. How warm is Arlen?"}], "extra_info": row}
    pd.DataFrame([verl]).to_parquet(tmp_path / "verl.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["val.jsonl", "val.csv", "plain.parquet", "verl.parquet"])
def test_every_form_of_file_is_read(files, name):
    match = HeldOut.read([files / name], 0.8).match("how warm is arlen")
    row = 2 if name == "val.csv" else 1
    assert match.kind == "exact" and match.where == f"{files / name}, row {row}"


def test_several_files(files):
    held_out = HeldOut.read([files / "val.csv", files / "val.jsonl"], 0.8)
    assert len(held_out) == 2 and held_out.match("阿伦的气温").where == f"{files / 'val.jsonl'}, row 3"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"query": "fine"}\n{"question": "q"}\n', "a.jsonl, row 2: no field 'query'"),
        ("b.jsonl", '{"query": "fine"}\n{"query": 3}\n', "b.jsonl, row 2: no field 'query'"),
        ("c.jsonl", '{"query": \n', "c.jsonl, row 1: not valid JSON"),
        ("d.csv", "question\nq\n", "d.csv: no column 'query'"),
        ("e.txt", "q\n", "files that end in '.txt' are not read"),
    ],
)
def test_a_held_out_row_that_cannot_be_read_is_named(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        HeldOut.read([tmp_path / name], 0.8)


def test_a_missing_file_is_named(tmp_path):
    for name in ("none.jsonl", "none.parquet"):
        with pytest.raises(DataError, match=name):
            HeldOut.read([tmp_path / name], 0.8)
