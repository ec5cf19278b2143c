"""`rltr coldstart export` as a process of its own, with a teacher over HTTP, ended by a real signal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.coldstart.export_kit import call, played, sample, saved, select, two_turns

ROOT = Path(__file__).parents[2]
CODE = """
import typer
from rltr_verl.cli.coldstart_export import export
app = typer.Typer()
app.command("export")(export)
app.callback()(lambda: None)
app()
"""
GREEN, RESET = "\x1b[1;32m", "\x1b[0m"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved("qwen3", tmp_path_factory.mktemp("model"))


@contextmanager
def teacher(folder: Path, *options: str) -> Iterator[str]:
    """A chat server in a process of its own; its base URL."""
    port = folder / "port"
    command = [sys.executable, "-m", "tests.fakes.openai_server", "--port-file", str(port), *options]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        while not port.exists():
            assert process.poll() is None
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port.read_text()}/v1"
    finally:
        process.terminate()
        process.wait(30)


def argv(folder: Path, model: Path, *options: str) -> list[str]:
    return [sys.executable, "-c", CODE, "export", "--dir", str(folder), "--model", str(model), *options]


def run(command: list[str], **env: str) -> subprocess.CompletedProcess:
    import os

    environment = {**os.environ, "COLUMNS": "160", **env}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment)


def figures(output: str) -> dict[str, list[str]]:
    """The table's lines: name and cells."""
    rows = (re.split(r"\s{2,}", line.strip()) for line in output.splitlines() if re.search(r"\S\s{2,}\S", line))
    return {name: cells for name, *cells in rows}


def test_a_table_the_notes_and_the_files(model, tmp_path):
    long = played("qwen3", [(call(), ["word " * 500]), ("<answer>", [])])[1]
    chosen = [sample(two_turns("qwen3"), n, f"q{n}", reference="41") for n in range(3)]
    folder = select(tmp_path / "cs", [*chosen, sample(long, 0, "long")])
    done = run(argv(folder, model, "--answers", "reference", "--max-length", "900", "--out", str(tmp_path / "out")))
    assert done.returncode == 0, done.stderr
    table = figures(done.stdout)
    assert table["4 selected"] == ["planner", "end_to_end", "summarizer"]
    assert table["rows"] == ["3", "3", "3"] and table["refused: too_long"] == ["1", "0", "0"]
    assert table["verl's own dataset: same"] == ["3", "3", "0"]
    assert "answers: 3 reference, 1 no reference" in done.stdout
    assert "first refused (planner, too_long): long/0: " in done.stdout
    assert "prompts are not compared with the planner's" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "planner.parquet", "end_to_end.parquet", "summarizer.parquet", "export.json",
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "export.json").read_text())["answers"] == {"reference": 3, "no reference": 1}


def test_the_preview_is_coloured_and_markup_in_a_row_is_text(model, tmp_path):
    trajectory = played("qwen3", [(call("[bold]x[/] \x1b[31m"), ["41 [red]"]), ("<answer>", [])])[1]
    folder = select(tmp_path, [sample(trajectory)])
    command = argv(folder, model, "--loss", "action_only", "--preview", "1")
    done = run(command, FORCE_COLOR="1", TERM="xterm-256color")
    assert done.returncode == 0, done.stderr
    assert "row 0: " in done.stdout and "tokens are trained" in done.stdout
    trained = "".join(re.findall(re.escape(GREEN) + r"([^\x1b]*)", done.stdout))
    assert '"query": "[bold]x[/] ' in trained and trained.endswith("<answer>") and "41 [red]" not in trained
    assert "41 [red]" in done.stdout and "\x1b[31m" not in done.stdout.replace("\\u001b", "")


def test_nothing_to_write_and_mistakes_have_their_exit_codes(model, tmp_path):
    done = run(argv(tmp_path, model))
    assert done.returncode == 2 and "nothing is selected yet" in done.stderr
    select(tmp_path, [sample(played("qwen3", [("It is 41.", [])])[1])])
    done = run(argv(tmp_path, model))
    assert done.returncode == 1 and figures(done.stdout)["refused: no_stop_marker"] == ["1", "0", "0"]
    done = run(argv(tmp_path, model, "--answers", "teacher"))
    assert done.returncode == 2 and "no teacher is named" in done.stderr
    done = run(argv(tmp_path, model, "--loss", "all"))
    assert done.returncode == 2 and "action+final_think" in done.stderr


def asking(query: str):
    trajectory = two_turns("qwen3")
    return type(trajectory)(**{**vars(trajectory), "query": query})


def test_answers_that_came_before_an_interrupt_are_kept_and_a_rerun_asks_for_the_others(model, tmp_path):
    folder = select(tmp_path / "cs", [sample(asking(f"Query {n}?"), n, f"q{n}") for n in range(12)])
    with teacher(tmp_path, "--content", "It is 41.", "--latency-ms", "150") as url:
        changes = ["--set", f"teacher.base_url={url}", "--set", "teacher.model=m", "--set", "teacher.concurrency=1"]
        process = subprocess.Popen(argv(folder, model, *changes), cwd=ROOT, stderr=subprocess.PIPE, text=True)
        answers = folder / "answers.jsonl"
        while not answers.exists() or answers.read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 130 and "the same command goes on" in said
        kept = answers.read_bytes()
        assert 3 <= kept.count(b"\n") < 12 and not (folder / "planner.parquet").exists()
        done = run(argv(folder, model, *changes))
    assert done.returncode == 0, done.stderr
    assert answers.read_bytes().startswith(kept) and answers.read_bytes().count(b"\n") == 12
    assert figures(done.stdout)["rows"] == ["12", "12", "12"]
    messages = pq.read_table(folder / "summarizer.parquet").to_pylist()[0]["messages"]
    assert messages[-1] == {"role": "assistant", "content": "It is 41."}
