from __future__ import annotations

import json

import pytest

from rltr_verl.errors import BadArguments, DataError
from rltr_verl.tools.search import NOTHING_FOUND, search

DOCUMENTS = [
    {"key": "Arlen temperature", "text": "Arlen temperature: 41"},
    {"key": "Arlen population", "text": "Arlen population: 17"},
    {"key": "Brona temperature", "text": "Brona temperature: 63"},
    {"key": "Brona 气温", "text": "Brona 气温: 63"},
    {"key": "Brona 人口", "text": "Brona 人口: 22"},
    {"title": "The river", "text": "A river runs past Arlen and Brona."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "facts.jsonl"
    path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in DOCUMENTS) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("Arlen temperature", "Arlen temperature: 41"),
        ("temperature of ARLEN?", "Arlen temperature: 41"),
        ("Brona的气温", "Brona 气温: 63"),
        ("Brona 人口", "Brona 人口: 22"),
        ("ｂｒｏｎａ temperature", "Brona temperature: 63"),
        ("river", "A river runs past Arlen and Brona."),
        ("weather today", NOTHING_FOUND),
    ],
)
def test_best_document(corpus, query, text):
    assert search(query, corpus=corpus) == text


@pytest.mark.parametrize("query", ["", "  ", "?!"])
def test_a_query_without_words_is_refused(corpus, query):
    with pytest.raises(BadArguments):
        search(query, corpus=corpus)


def test_every_document_of_a_world_is_found_by_its_key(tmp_path):
    from rltr_verl.world.facts import make_facts

    path = tmp_path / "facts.jsonl"
    documents = list(make_facts(1).documents())
    path.write_text("".join(json.dumps(entry) + "\n" for entry in documents))
    assert len(documents) > 200
    for entry in documents:
        assert search(entry["key"], corpus=str(path)) == entry["text"]


def test_a_missing_or_broken_corpus_is_named_with_the_fix(tmp_path):
    with pytest.raises(DataError, match="none.jsonl.*tool_settings.search.corpus"):
        search("x", corpus=str(tmp_path / "none.jsonl"))
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"body": "no text"}\n')
    with pytest.raises(DataError, match="bad.jsonl, line 2"):
        search("x", corpus=str(path))
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match="no document"):
        search("x", corpus=str(path))
