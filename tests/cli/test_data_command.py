"""`rltr data` as a user calls it."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import typer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from rltr_verl.cli.data import data
from rltr_verl.data import load_planner_prompt
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.tooling import load_tools, schemas

TOOLS = ["calculator", "days_between"]
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
app = typer.Typer()
app.command()(data)


@pytest.fixture
def model(tiny_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(tmp_path, *rows, options=()):
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return CliRunner().invoke(app, [str(path), *map(str, options)])


def test_files_and_figures(tmp_path):
    rows = [{"query": "q"}, {"query": "Q"}, {"query": "r", "difficulty": "hard"}, {"query": "s", "needs": []}]
    result = run(tmp_path, *rows, options=["--out", tmp_path / "out", "--val-share", "0.4"])
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["queries", "2", "1"] in lines
    assert "4 rows read, dropped: 1 near duplicate." in result.stdout
    for name, count in (("train", 2), ("val", 1)):
        file = tmp_path / "out" / f"{name}.parquet"
        assert f"written: {file}" in result.stdout and pq.read_metadata(file).num_rows == count


def test_without_out_it_only_checks(tmp_path):
    result = run(tmp_path, {"query": "q"})
    assert result.exit_code == 0 and "Nothing is written" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["q.jsonl"]


def test_bad_rows_end_with_status_2_and_no_traceback(tmp_path):
    result = run(tmp_path, {"query": "q", "ned": 1}, {"qery": 2}, options=["--out", tmp_path / "out"])
    assert result.exit_code == 2 and result.stdout == ""
    assert "row 1: unknown field 'ned'" in result.stderr and "row 2: no field 'query'" in result.stderr
    assert not (tmp_path / "out").exists()


def test_fields_may_be_left_out(tmp_path):
    result = run(tmp_path, {"query": "q", "a": 1, "b": 2}, options=["--ignore", "a", "--ignore", "b"])
    assert result.exit_code == 0, result.output


def test_tokens_and_preview_are_those_of_the_rollout(tmp_path, model):
    rows = [{"query": "first", "tools": ["calculator"]}, {"query": "second"}]
    tools = ["--set", "tools=[calculator,days_between]"]
    result = run(tmp_path, *rows, options=["--model", model, *tools, "--preview", 2, "--val-share", 0])
    assert result.exit_code == 0, result.output
    template = ChatTemplate(AutoTokenizer.from_pretrained(model), schemas(load_tools(TOOLS)))
    system = {"role": "system", "content": load_planner_prompt().system}
    shown = [schemas(load_tools(TOOLS[:1])), schemas(load_tools(TOOLS))]
    lengths = []
    for number, (row, chosen) in enumerate(zip(rows, shown, strict=True), 1):
        ids = template.prompt_ids([system, {"role": "user", "content": row["query"]}], chosen)
        assert f"--- row {number}, {len(ids)} tokens\n{template.decode(ids)}" in result.stdout
        lengths.append(len(ids))
    assert [line.split()[-2] for line in result.stdout.splitlines() if "prompt tokens" in line] == [
        str(min(lengths)),
        str(min(lengths)),
        str(max(lengths)),
    ]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"tools": ["calculater"]}, [], "field 'tools': no tool 'calculater' (tools: calculator)"),
        ({"needs": [{"tool": "search"}]}, [], "field 'needs': no tool 'search' (tools: calculator)"),
        ({"query": "word " * 99}, ["--max-prompt-tokens", "500"], "tokens, --max-prompt-tokens is 500"),
    ],
)
def test_with_a_model_tools_and_lengths_are_checked(tmp_path, model, row, options, message):
    given = ["--model", model, "--set", "tools=[calculator]", "--prompt", "none", *options]
    result = run(tmp_path, {"query": "good"}, {"query": "q", **row}, options=given)
    assert result.exit_code == 2 and message in result.stderr and "q.jsonl, row 2" in result.stderr
    assert "1 of 2 rows" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preview", "1"], "--preview: there is no model"),
        (["--set", "tools=[calculator]"], "--set: there is no model"),
        (["--model", "/no/such"], "--model: no model folder '/no/such'"),
        (["--prompt", "/no/such.txt"], "--prompt: the prompt file /no/such.txt cannot be read"),
        (["--val", "/no/such.jsonl"], "/no/such.jsonl: no such file"),
    ],
)
def test_wrong_options_are_told(tmp_path, options, message):
    result = run(tmp_path, {"query": "q"}, options=options)
    assert result.exit_code == 2 and message in result.stderr and "Fix: " in result.stderr


def test_a_difficulty_in_brackets_is_no_markup(tmp_path):
    assert "difficulty: [hard]" in run(tmp_path, {"query": "q", "difficulty": "[hard]"}).stdout


def test_help_shows_brackets(tmp_path):
    assert "tools=[search,code]" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "160"}).output


def test_inspect(tmp_path):
    assert run(tmp_path, {"query": "q"}, options=["--out", tmp_path / "a.parquet"]).exit_code == 0
    result = CliRunner().invoke(app, [str(tmp_path / "a.parquet"), "--inspect"])
    assert result.exit_code == 0 and "a.parquet: 1 rows" in result.stdout and "  data_source: string" in result.stdout
    first = json.loads(result.stdout[result.stdout.index("{\n") :])
    assert first["extra_info"]["query"] == "q" and "needs" not in first["extra_info"]
    result = CliRunner().invoke(app, [str(tmp_path / "q.jsonl"), "--inspect"])
    assert result.exit_code == 2 and "give a parquet file" in result.stderr
