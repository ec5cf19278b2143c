"""`rltr coldstart sample` as a process of its own, against a server over HTTP, ended by real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.coldstart.sampling_kit import Kit, ids_of, lines_of, towns, write_queries
from tests.fakes.planner_server import ROOT, planner_server

RLTR = [sys.executable, "-c", "from rltr_verl.cli.main import app; app()"]


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    return Kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture(scope="module")
def server():
    with planner_server(latency_ms=30) as url:
        yield url


@pytest.fixture
def command(kit, server, tmp_path):
    """``command(rows, ...)``: the argument list of a run in ``tmp_path/cs``."""

    def build(rows, *options, url=server, n=4, concurrency=4):
        queries = write_queries(tmp_path / "q.jsonl", *rows)
        settings = [f"tools=[{kit.tool}]", f"teacher.base_url={url}", "teacher.model=m"]
        changes = [word for item in (*settings, f"teacher.concurrency={concurrency}") for word in ("--set", item)]
        place = [str(queries), "--dir", str(tmp_path / "cs"), "--model", str(kit.model), "-n", str(n)]
        return [*RLTR, "coldstart", "sample", *place, *changes, *options]

    build.folder = tmp_path / "cs"
    return build


def run(argv) -> subprocess.CompletedProcess:
    return subprocess.run(argv, capture_output=True, text=True, timeout=240, cwd=ROOT)


def start(argv, folder: Path, lines: int) -> subprocess.Popen:
    """The process, once it has written so many samples."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    file, deadline = folder / "samples.jsonl", time.monotonic() + 200
    while not file.exists() or file.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for the signal."""
    status = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
    return bool(int(status, 16) >> (number - 1) & 1)


def wanted(rows, n=4):
    return sorted(f"{row['id']}/{number}" for row in rows for number in range(n))


def test_samples_and_figures(command):
    rows = [*towns(3), b'{"query": "\xff"}', {"query": "how warm is TOWN 1"}]
    result = run(command(rows, n=2))
    assert result.returncode == 0, result.stderr
    assert sorted(ids_of(command.folder)) == wanted(towns(3), 2)
    figures = [line.split() for line in result.stdout.splitlines()]
    assert ["ok", "6"] in figures and ["prompt", "tokens", "1,200", "1,200"] in figures
    assert "3 queries, 1 repeated ones dropped" in result.stdout
    assert "1 rows cannot be used" in result.stderr and "Traceback" not in result.stderr
    assert json.loads((command.folder / "skipped_rows.jsonl").read_text())["line"] == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_130_and_says_how_to_go_on(command, number):
    rows = towns(60)
    process = start(command(rows), command.folder, 12)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    done = len(lines_of(command.folder))
    assert 12 <= done < 240 and all(line["outcome"] == "ok" for line in lines_of(command.folder))
    assert f"interrupted: {done} of 240 samples are done, {240 - done} are left" in err
    assert "rltr coldstart sample" in err and "--dir" in err and "Traceback" not in err
    result = run(command(rows, concurrency=32))
    assert result.returncode == 0, result.stderr
    ids = [line["id"] for line in lines_of(command.folder)]
    assert sorted(ids) == wanted(rows)
    assert ["attempts", str(240 - done)] in [line.split() for line in result.stdout.splitlines()]


def test_case_s07a_a_killed_run_goes_on_with_every_id_once(command):
    rows = towns(40)
    for lines in (10, 60):
        process = start(command(rows), command.folder, lines)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    result = run(command(rows, concurrency=32))
    assert result.returncode == 0, result.stderr
    assert sorted(line["id"] for line in lines_of(command.folder)) == wanted(rows)


def test_a_signal_before_the_first_request_is_130_too(command):
    process = subprocess.Popen(command(towns(3)), stderr=subprocess.PIPE, text=True, cwd=ROOT)
    while not catches(process.pid, signal.SIGTERM):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in err


def test_a_server_that_is_gone_is_one_clear_error_and_a_rerun_makes_what_failed(command, server):
    argv = command(towns(10), "--set", "teacher.retries=0", url="http://127.0.0.1:9/v1", concurrency=2)
    result = run(argv)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "SamplingStopped: rltr.teacher: the last 6 attempts have all failed" in result.stderr
    assert {line["outcome"] for line in lines_of(command.folder)} == {"failed"}
    assert run(command(towns(10))).returncode == 0
    assert sorted(ids_of(command.folder)) == wanted(towns(10))


def test_mistakes_end_with_2_before_anything_is_asked(command):
    for options, message in [
        (["--strict"], "1 of 2 rows cannot be used"),
        (["--set", "teacher.temprature=1"], "did you mean 'temperature'"),
        (["--model", "/no/such/model"], "no model folder"),
    ]:
        result = run(command([*towns(1), {"query": 3}], *options))
        assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
        assert not command.folder.exists()
