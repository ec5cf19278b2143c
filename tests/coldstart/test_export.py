"""The export: what is written loads in verl's trainer with the ids of the rollout; what is not has its reason."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from rltr_verl.coldstart.export import export
from rltr_verl.coldstart.export_report import SETS, ExportOptions, Report
from rltr_verl.coldstart.loss import LOSS_POLICIES
from rltr_verl.coldstart.parquet import RowFile, tools_type
from rltr_verl.config import load_settings
from rltr_verl.data.prompt_files import load_planner_prompt, prompt_messages
from rltr_verl.errors import ConfigError, DataError
from rltr_verl.rollout.sft_prompts import open_dataset
from rltr_verl.tooling import load_tools
from tests.coldstart.export_kit import FAMILIES, call, played, sample, select, template_of, tokenizer_of, two_turns
from tests.fakes.families import TOOLS

QWEN, LLAMA = "qwen3", "llama3"


def exported(folder: Path, family: str = QWEN, node: dict[str, Any] | None = None, **options: Any) -> Report:
    given = {"template_kwargs": FAMILIES[family].kwargs, "answers": "reference", **options}
    return export(folder, load_settings(node or {}), tokenizer_of(family), ExportOptions(**given))


def rows(folder: Path, name: str = "planner") -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


def several(family: str, n: int = 3) -> list[Any]:
    thought = family != "qwen3-no-think"
    return [sample(two_turns(family, thought), number, f"q{number}", reference="41") for number in range(n)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss", LOSS_POLICIES)
def test_every_set_holds_the_ids_of_the_rollout(tmp_path, family, loss):
    thought = family != "qwen3-no-think"
    think = "<think>\nx\n</think>\n\n" if thought else ""
    turns = [(f"{think}{call()}\n{call('b')}", ["41", "巴黎 </tool_response>"]), (f"{think}<answer>", [])]
    rollout, trajectory = played(family, turns)
    select(tmp_path, [sample(trajectory, reference="It is 41.", difficulty="hard")])
    report = exported(tmp_path, family, loss=loss)
    data = {"apply_chat_template_kwargs": FAMILIES[family].kwargs}
    dataset = open_dataset(tmp_path / "planner.parquet", tokenizer_of(family), data)
    assert dataset[0]["input_ids"].tolist() == rollout.prompt_ids + rollout.ids
    assert dataset[0]["loss_mask"].sum() == report.sets["planner"].trained > 0
    assert dataset.policy(0) == loss
    whole = open_dataset(tmp_path / "end_to_end.parquet", tokenizer_of(family), data)
    ids = whole[0]["input_ids"].tolist()
    assert ids[: len(rollout.prompt_ids + rollout.ids) - 1] == (rollout.prompt_ids + rollout.ids)[:-1]
    text = template_of(family).decode([item for item, on in zip(ids, whole[0]["loss_mask"], strict=True) if on])
    assert "<answer>It is 41.</answer>" in text
    summarizer = open_dataset(tmp_path / "summarizer.parquet", tokenizer_of(family), data)
    trained = summarizer[0]["input_ids"][summarizer[0]["loss_mask"].bool()].tolist()
    assert template_of(family).decode(trained).startswith("It is 41.")
    assert {name: (found.rows, dict(found.refused)) for name, found in report.sets.items()} == dict.fromkeys(
        SETS, (1, {})
    )


def test_columns_are_plain_and_say_where_a_row_comes_from(tmp_path):
    select(tmp_path, [sample(two_turns(QWEN), 3, "q7", difficulty="hard", tool_selection=["search"])])
    ledger = [{"id": "q7/3", "score": 0.75, "kept": True}, {"id": "q7/1", "score": 0.1, "kept": False}]
    (tmp_path / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ledger))
    exported(tmp_path, answers="none", loss="action_only")
    (row,) = rows(tmp_path)
    assert [set(message) for message in row["messages"]] == [{"role", "content"}] * 4
    assert json.loads(row["tools_json"]) == TOOLS == row["tools"]
    assert {key: row[key] for key in ("id", "query_id", "score", "difficulty", "loss", "tool_selection")} == {
        "id": "q7/3", "query_id": "q7", "score": 0.75, "difficulty": "hard", "loss": "action_only",
        "tool_selection": ["search"],
    }  # fmt: skip


def test_without_answers_only_the_planners_set_is_written_and_an_older_one_does_not_stay(tmp_path):
    select(tmp_path, several(QWEN))
    exported(tmp_path)
    assert {path.name for path in tmp_path.glob("*.parquet")} == {f"{name}.parquet" for name in SETS}
    report = exported(tmp_path, answers="none")
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["planner.parquet"]
    assert report.answers == {} and not list(tmp_path.glob(".*"))


def test_verls_own_dataset_loads_every_set(tmp_path):
    select(tmp_path, several(LLAMA))
    report = exported(tmp_path, LLAMA)
    for name in SETS:
        with redirect_stdout(StringIO()):
            stock = MultiTurnSFTDataset([str(tmp_path / f"{name}.parquet")], tokenizer_of(LLAMA), {"max_length": 4096})
        assert [len(stock[index]["input_ids"]) for index in range(3)] == [4096] * 3
        assert report.sets[name].stock == {"same": 3, "differs": 0, "refused": 0, "why": None}


PARALLEL = [(f"<think>\nx\n</think>\n\n{call()}\n{call('b')}", ["1", "2"]), ("<think>\ny\n</think>\n\n<answer>", [])]


@pytest.mark.parametrize(
    ("family", "parallel", "found"),
    [
        ("qwen3", False, (1, 0, 0)),
        ("qwen3", True, (0, 0, 1)),
        ("qwen3-no-think", False, (0, 0, 1)),
        ("qwen2.5", False, (0, 0, 1)),
        ("llama3", True, (1, 0, 0)),
    ],
)
def test_where_verls_own_dataset_has_other_ids_is_counted(tmp_path, family, parallel, found):
    trajectory = played(family, PARALLEL)[1] if parallel else two_turns(family, family != "qwen3-no-think")
    select(tmp_path, [sample(trajectory)])
    stock = exported(tmp_path, family, answers="none").sets["planner"].stock
    assert (stock["same"], stock["differs"], stock["refused"]) == found


def test_splits_go_by_the_query_and_are_the_same_in_every_set(tmp_path):
    chosen = [sample(two_turns(QWEN), number, f"q{number // 2}", reference="41") for number in range(40)]
    select(tmp_path, chosen)
    report = exported(tmp_path, val_share=0.3)
    queries = {}
    for name in SETS:
        train, val = ({row["query_id"] for row in rows(tmp_path, name + split)} for split in ("", "_val"))
        assert not train & val and len(train | val) == 20 and val
        queries[name] = val
        assert report.sets[name].rows + report.sets[name].val_rows == 40
    assert len(set(map(frozenset, queries.values()))) == 1


# what is refused


def test_rows_that_would_lose_their_end_are_refused_with_a_count(tmp_path):
    long = played(QWEN, [(call(), ["word " * 500]), ("<answer>", [])])[1]
    select(tmp_path, [*several(QWEN, 2), sample(long, 0, "long", reference="41")])
    report = exported(tmp_path, max_length=400)
    assert [row["query_id"] for row in rows(tmp_path)] == ["q0", "q1"]
    planner = report.sets["planner"]
    assert planner.refused == {"too_long": 1} and planner.longest <= 400
    assert planner.first["too_long"].startswith("long/0: ") and "400 allowed" in planner.first["too_long"]
    stored = json.loads((tmp_path / "export.json").read_text())
    assert stored["sets"]["planner"]["refused"] == {"too_long": 1} and stored["selected"] == 3


def test_each_fault_has_its_reason(tmp_path):
    decomposed = two_turns(QWEN)
    first = decomposed.turns[0]
    ended = type(first)(**{**vars(first), "text": "e\u0301 " + first.text})
    control = type(first)(**{**vars(first), "text": "a<|im_end|>b " + first.text})
    no_marker = played(QWEN, [("It is 41.", [])])[1]
    trajectories = {
        "text": replaced(decomposed, ended),
        "control": replaced(decomposed, control),
        "no_stop_marker": no_marker,
    }
    select(tmp_path, [sample(trajectory, 0, kind) for kind, trajectory in trajectories.items()])
    report = exported(tmp_path, answers="none").sets["planner"]
    assert dict(report.refused) == dict.fromkeys(trajectories, 1) and report.rows == 0
    assert not (tmp_path / "planner.parquet").exists()


def replaced(trajectory: Any, first: Any) -> Any:
    return type(trajectory)(**{**vars(trajectory), "turns": (first, *trajectory.turns[1:])})


def test_a_prompt_that_the_planner_is_not_shown_is_refused(tmp_path):
    select(tmp_path, several(QWEN, 2))
    report = exported(tmp_path, node={"tools": ["calculator"]}, answers="none")
    assert report.prompts_compared and report.sets["planner"].refused == {"prompt": 2}
    assert "differs from the rollout's at token" in report.sets["planner"].first["prompt"]


def test_the_shipped_prompts_pass_with_the_recipes_tools_in_both_sets(tmp_path):
    """End to end the planner's prompt gives way to another one, which is no difference of the tools or the template."""
    tool = tmp_path / "find.py"
    tool.write_text(
        'from rltr_verl import tool\n\n@tool\ndef find(query: str) -> str:\n    """Find."""\n    return query\n'
    )
    node = {"tools": [str(tool)]}
    shown = tuple(item.schema for item in load_tools(node["tools"], {}).values())
    prompt = tuple(prompt_messages(load_planner_prompt("en"), "How warm is it in Arlen?"))
    subject = sample(replace(two_turns(QWEN), tools=shown), reference="41")
    select(tmp_path, [replace(subject, task=replace(subject.task, prompt=prompt))])
    report = exported(tmp_path, node=node)
    assert report.prompts_compared
    assert [(found.rows, dict(found.refused)) for found in report.sets.values()] == [(1, {})] * 3


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match="nothing is selected yet.*rltr coldstart select"):
        exported(tmp_path)
    select(tmp_path, several(QWEN, 1))
    with pytest.raises(ConfigError, match="no teacher is named"):
        exported(tmp_path, answers="teacher")
    (tmp_path / "selected.jsonl").write_text('{"id": "x"}\n')
    with pytest.raises(DataError, match=r"selected.jsonl, line 1: is no sample"):
        exported(tmp_path)


def test_a_failure_leaves_the_older_files_as_they_were(tmp_path):
    select(tmp_path, several(QWEN, 2))
    exported(tmp_path)
    before = (tmp_path / "planner.parquet").read_bytes()
    with (tmp_path / "selected.jsonl").open("a") as file:
        file.write('{"id": "x"}\n')
    with pytest.raises(DataError):
        exported(tmp_path)
    assert (tmp_path / "planner.parquet").read_bytes() == before
    assert not list(tmp_path.glob(".planner*"))


# the tools' column


def schema(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def test_tools_that_parquet_cannot_hold_as_structs_stay_text(tmp_path):
    text, number = {"type": "string"}, {"type": "integer"}
    assert tools_type([[schema("a", {"x": text}), schema("b", {"y": number})]]) is not None
    assert tools_type([[schema("a", {})]]) is None, "a mapping without keys"
    assert tools_type([[schema("a", {"x": {"enum": ["s", 1]}})]]) is None, "two types in a list"
    closed, open_to_text = (
        schema(name, {"x": text}, additionalProperties=more) for name, more in (("a", False), ("b", text))
    )
    assert tools_type([[closed, open_to_text]]) is None, "a truth value and a mapping under one key"
    assert tools_type([[]]) is None and tools_type([]) is None


def test_a_file_of_many_rows_is_written_in_batches_and_read_back(tmp_path):
    tools = [schema("a", {"x": {"type": "string"}}), schema("b", {"y": {"type": "string"}})]
    file = RowFile(tmp_path / "x.parquet", tools_type([tools]))
    for number in range(600):
        messages = [{"role": "user", "content": f"{number} \ud800"}]
        row = dict.fromkeys(["score", "difficulty", "tool_selection"])
        file.add({"messages": messages, "tools": tools, "id": str(number), "query_id": "q", "loss": "x", **row})
    assert not (tmp_path / "x.parquet").exists(), "it appears complete or not at all"
    assert file.finish()
    table = pq.read_table(tmp_path / "x.parquet")
    assert table.num_rows == 600 and isinstance(table, pa.Table)
    last = table.to_pylist()[-1]
    assert last["messages"] == [{"role": "user", "content": "599 \ufffd"}] and json.loads(last["tools_json"]) == tools
