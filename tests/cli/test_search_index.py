"""``rltr search-index``."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from rltr_verl.cli.search_index import search_index
from rltr_verl.tools.search import search

app = typer.Typer()
app.command()(search_index)


@pytest.fixture
def documents(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"title": f"T{n}", "text": f"text number {n}"}) + "\n" for n in range(5000)))
    return path


def test_an_index_is_made_and_searched(documents, tmp_path):
    out = tmp_path / "deep" / "index"
    done = CliRunner().invoke(app, [str(documents), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert f"{out}: 5000 documents, 0." in done.stdout.replace("\n", "")
    assert search("4321", index=str(out)) == "text number 4321"


def test_errors_are_one_message(documents, tmp_path):
    out = tmp_path / "index"
    assert CliRunner().invoke(app, [str(documents), "--out", str(out)]).exit_code == 0
    again = CliRunner().invoke(app, [str(documents), "--out", str(out)])
    assert again.exit_code == 2 and "--overwrite" in again.output
    assert CliRunner().invoke(app, [str(documents), "--out", str(out), "--overwrite"]).exit_code == 0
    assert "reading" not in again.output
    missing = CliRunner().invoke(app, [str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "x")])
    assert missing.exit_code == 2 and "none.jsonl" in missing.output and "Traceback" not in missing.output
