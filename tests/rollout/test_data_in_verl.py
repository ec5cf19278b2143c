"""What `rltr data` writes passes the preflight and reads through verl's own dataset into the planner loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.dataset.rl_dataset import collate_fn

from rltr_verl._compose import compose_recipe
from rltr_verl.config import from_omegaconf
from rltr_verl.data import DataOptions, build_data, load_planner_prompt
from rltr_verl.errors import DataError
from rltr_verl.judge.checklist import parse_needs
from rltr_verl.preflight import check
from rltr_verl.rollout.turns import Planner, query_of
from rltr_verl.rows import read_messages, read_rows, write_rows
from rltr_verl.world import build_world

IGNORED = frozenset({"index", "split", "kind", "lang", "plan"})
LINES = (Path(__file__).parents[1] / "cases" / "dataset.jsonl").read_text(encoding="utf-8").splitlines()
CASES = {case["id"]: case["input"]["rows"] for case in map(json.loads, LINES)}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_world(tmp_path_factory.mktemp("world") / "w", seed=1)


@pytest.fixture(scope="module")
def built(world, tmp_path_factory):
    """The world's queries as a user's file; some rows with tools of their own, some without needs or a reference."""
    folder = tmp_path_factory.mktemp("data")
    rows = [json.loads(line) for line in (world.folder / "val.jsonl").read_text("utf-8").splitlines()][:40]
    rows[0]["tools"] = ["search", "calculator", "days_between"]
    del rows[1]["reference"]
    rows[2]["difficulty"] = 3
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "queries.jsonl").write_text(text, encoding="utf-8")
    return build_data(folder / "queries.jsonl", folder / "out", DataOptions(val_share=0.25, ignore=IGNORED))


def recipe(world, train, val, *overrides):
    files = [f"data.train_files={train}", f"data.val_files={val}"]
    lengths = ["data.max_prompt_length=960", "data.max_response_length=64"]  # together what the tiny model has
    return compose_recipe("rltr_planner", ["scale=cpu", f"rltr.world={world.folder}", *files, *lengths, *overrides])


def dataset_of(config, file, world):
    return create_rl_dataset([str(file)], config.data, AutoTokenizer.from_pretrained(world.model), None)


def test_it_passes_the_preflight(world, built):
    check(recipe(world, built.files["train"], built.files["val"]))


def test_the_preflight_reads_its_needs_and_tools(world, built, tmp_path):
    rows = list(read_rows(built.files["val"]))
    rows[1]["extra_info"]["tool_selection"] = ["serach"]
    write_rows(tmp_path / "bad.parquet", rows)
    with pytest.raises(DataError, match=r"row 2 .*: field 'extra_info.tool_selection' names 'serach'"):
        check(recipe(world, tmp_path / "bad.parquet", built.files["val"]))


@pytest.mark.parametrize("split", ["train", "val"])
def test_verl_reads_it_and_the_planner_sees_what_was_written(world, built, split):
    config = recipe(world, built.files["train"], built.files["val"])
    dataset = dataset_of(config, built.files[split], world)
    written = pq.read_table(built.files[split]).to_pylist()
    assert len(dataset) == len(written) == built.count("queries", split=split) > 0
    batch = collate_fn([dataset[place] for place in range(len(dataset))])
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    planner = Planner.build(from_omegaconf(config), tokenizer)
    for place, row in enumerate(written):
        fields = {key: values[place] for key, values in batch.items() if isinstance(values, np.ndarray)}
        info = fields["extra_info"]
        messages = read_messages(fields["raw_prompt"])
        language = row["extra_info"]["lang"]
        assert messages[0] == {"role": "system", "content": load_planner_prompt(language).system}
        assert messages[1:] == [{"role": "user", "content": row["extra_info"]["query"]}]
        assert query_of(messages, info) == row["extra_info"]["query"]
        assert parse_needs(info["needs"], "row") == parse_needs(row["extra_info"]["needs"], "row")
        assert set(planner.shown(info)) == {"search", "calculator", "days_between"}
        assert fields["agent_name"] == "rltr_planner" and fields["data_source"] == "queries"
        assert fields["reward_model"]["ground_truth"] == (row["extra_info"]["reference"] or "")
        assert fields["index"] == info["index"] == row["extra_info"]["index"]


def test_files_of_different_builds_are_trained_on_together(world, built, tmp_path):
    (tmp_path / "q.jsonl").write_text('{"query": "q"}')
    other = build_data(tmp_path / "q.jsonl", tmp_path / "other.parquet")
    config = recipe(world, built.files["train"], built.files["val"])
    files = [str(other.files["train"]), str(built.files["train"])]
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    assert len(create_rl_dataset(files, config.data, tokenizer, None)) == 1 + built.count("queries")


@pytest.mark.parametrize("case", ["D07a", "D07b", "D04a"])
def test_rows_with_nothing_in_extra_info_are_read(world, built, tmp_path, case):
    row = {"prompt": [{"role": "user", "content": "q"}], "data_source": "x", **CASES[case][0]}
    write_rows(tmp_path / "rows.parquet", [row])
    config = recipe(world, tmp_path / "rows.parquet", built.files["val"])
    (fields,) = list(dataset_of(config, tmp_path / "rows.parquet", world))
    planner = Planner.build(from_omegaconf(config), AutoTokenizer.from_pretrained(world.model))
    assert list(planner.shown(fields["extra_info"])) == list(planner.schemas)
    assert query_of(read_messages(fields["raw_prompt"]), fields["extra_info"]) == "q"
    with pytest.raises(DataError, match=r"row 1 .*: no 'extra_info.needs'"):
        check(config)


def test_d06a_a_missing_column_is_named(world, built, tmp_path):
    write_rows(tmp_path / "rows.parquet", CASES["D06a"])
    with pytest.raises(DataError, match=r"rows.parquet, row 1.*: no 'extra_info.needs'.*Fix: write the query's needs"):
        check(recipe(world, tmp_path / "rows.parquet", built.files["val"]))
