"""`rltr coldstart select`: in this process for what it prints, as a process of its own for real signals."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from rltr_verl.cli.coldstart_select import select
from tests.coldstart.made import POOR, call, ledger, lines, played, reasons, sample, write
from tests.fakes.openai_server import FakeServer

ROOT = Path(__file__).parents[2]
CODE = "import typer; from rltr_verl.cli.coldstart_select import select; typer.run(select)"
CHECKLIST = ["--set", "judge.backend=checklist"]


def invoke(folder: Path, *options: str):
    app = typer.Typer()
    app.command()(select)
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["--dir", str(folder), *options])


def test_tables_and_files(tmp_path):
    write(tmp_path, sample("a", difficulty="easy"), sample("a", 1, difficulty="easy"), sample("b", trajectory=POOR))
    result = invoke(tmp_path, *CHECKLIST)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["sampled", "3", "2", "100.0%"] in rows and ["best", "of", "n", "1", "1", "33.3%"] in rows
    assert ["below_threshold", "1"] in rows and ["not_best", "1"] in rows
    assert ["easy", "1", "2", "2", "1", "1", "(100.0%)"] in rows
    assert "Judged by the rows' needs." in result.stdout
    assert "Queries without a kept trajectory: 1 below_threshold." in result.stdout
    assert "1 of 3 trajectories are kept" in result.stdout
    written = {path.name for path in tmp_path.iterdir()}
    assert {"ledger.jsonl", "selected.jsonl", "funnel.json", "funnel.png", "verdicts.jsonl"} <= written


def test_options_reach_the_selection(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"query": f"Held out {name}?"}))
    samples = [sample(f"e{number}", difficulty="easy") for number in range(4)]
    samples += [sample("h", number, difficulty="hard") for number in range(3)]
    samples += [sample(name, query=f"held out {name}", difficulty="easy") for name in ("one", "two")]
    write(tmp_path / "cold", *samples)
    held_out = ["--held-out", str(tmp_path / "one.jsonl"), "--held-out", str(tmp_path / "two.jsonl")]
    balanced = ["--keep", "2", "--balance", "equal", "--balance-ratio", "1.5"]
    result = invoke(tmp_path / "cold", *CHECKLIST, *held_out, *balanced, "--min-score", "1")
    assert result.exit_code == 0, result.output
    found = reasons(tmp_path / "cold")
    assert [found[name] for name in ("one/0", "two/0")] == ["contaminated"] * 2
    assert [found[f"h/{number}"] for number in range(3)] == ["best", "best", "not_best"]
    assert sorted(found[f"e{number}/0"] for number in range(4)) == ["balance", "best", "best", "best"]


def test_nothing_kept_is_status_1_and_says_where_to_look(tmp_path):
    write(tmp_path, sample(trajectory=POOR))
    result = invoke(tmp_path, *CHECKLIST)
    assert result.exit_code == 1 and "ledger.jsonl says why" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nothing says which endpoint the teacher is"),
        (["--judge", "teacher"], "nothing says which endpoint the teacher is"),
        ([*CHECKLIST, "--held-out", "none.jsonl"], "none.jsonl: no such file"),
        (["--set", "judge.n_vote=3"], "did you mean 'n_votes'"),
    ],
)
def test_what_has_to_be_mended_is_one_message(tmp_path, options, said):
    write(tmp_path, sample())
    result = invoke(tmp_path, *options)
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.output


def many(count):
    return [
        sample(f"q{number:03}", trajectory=played(call(query="arlen"), query=f"Query {number:03}?"))
        for number in range(count)
    ]


async def start(folder: Path, server: FakeServer, verdicts: int) -> asyncio.subprocess.Process:
    """The command as a process, once so many verdicts are there."""
    changes = ["judge.backend=endpoint", f"judge.base_url={server.url}", "judge.model=m", "judge.concurrency=4"]
    words = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-c", CODE, "--dir", str(folder), *words]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)
    file = folder / "verdicts.jsonl"
    while process.returncode is None and (not file.exists() or file.read_bytes().count(b"\n") < verdicts):
        await asyncio.sleep(0.01)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_a_run_that_is_ended_goes_on_and_asks_only_for_what_was_in_flight(tmp_path, number):
    write(tmp_path, *many(60))
    async with FakeServer("Score: 1", latency_s=0.02) as server:
        process = await start(tmp_path, server, verdicts=10)
        process.send_signal(number)
        _, errors = await asyncio.wait_for(process.communicate(), 120)
        known = (tmp_path / "verdicts.jsonl").read_bytes().count(b"\n")
        assert process.returncode == (-9 if number == signal.SIGKILL else 130), errors
        assert b"Traceback" not in errors and not (tmp_path / "ledger.jsonl").exists()
        assert 10 <= known < 60
        process = await start(tmp_path, server, verdicts=60)
        _, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, errors
    verdicts = [line["id"] for line in lines(tmp_path / "verdicts.jsonl")]
    assert sorted(verdicts) == [f"q{number:03}/0" for number in range(60)]
    assert set(reasons(tmp_path).values()) == {"best"} and len(ledger(tmp_path)) == 60
    assert server.count <= 3 * 60 + 3 * 4  # at most those in flight are asked about twice
