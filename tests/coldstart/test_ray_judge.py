"""Judging on Ray: two workers on this machine, real processes, one of them killed half-way."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil

from tests.coldstart.made import lines, reasons, write
from tests.coldstart.test_select_cli import CODE, ROOT, many
from tests.fakes.openai_server import FakeServer, Reply

YES = "Score: 1"


async def start(folder: Path, server: FakeServer, *options: str) -> asyncio.subprocess.Process:
    changes = ["judge.backend=endpoint", f"judge.base_url={server.url}", "judge.model=m", "judge.concurrency=6"]
    words = [word for change in (*changes, "judge.retries=0") for word in ("--set", change)]
    command = [sys.executable, "-c", CODE, "--dir", str(folder), "--ray", "local", *words, *options]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe, start_new_session=True)


async def until(process: asyncio.subprocess.Process, folder: Path, verdicts: int) -> None:
    file = folder / "verdicts.jsonl"
    while process.returncode is None and (not file.exists() or file.read_bytes().count(b"\n") < verdicts):
        await asyncio.sleep(0.01)


def workers_of(process: asyncio.subprocess.Process) -> list[psutil.Process]:
    below = psutil.Process(process.pid).children(recursive=True)
    return [child for child in below if child.is_running() and any("_Worker" in part for part in child.cmdline())]


async def test_a_worker_that_is_killed_half_way_loses_nothing_and_doubles_nothing(tmp_path):
    write(tmp_path, *many(120))
    async with FakeServer(Reply(YES, latency_s=0.1)) as server:
        process = await start(tmp_path, server)
        await until(process, tmp_path, 20)
        workers = workers_of(process)
        assert len(workers) == 2
        os.kill(workers[0].pid, signal.SIGKILL)
        _, errors = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, errors
    verdicts = lines(tmp_path / "verdicts.jsonl")
    assert sorted(line["id"] for line in verdicts) == [f"q{number:03}/0" for number in range(120)]
    assert {line["score"] for line in verdicts} == {1.0} and set(reasons(tmp_path).values()) == {"best"}
    assert b"A Ray worker died" in errors and b"Traceback" not in errors
    assert 3 * 120 <= server.count <= 3 * (120 + 3) and server.peak <= 6


async def test_an_interrupted_run_goes_on(tmp_path):
    write(tmp_path, *many(80))
    async with FakeServer(Reply(YES, latency_s=0.1)) as server:
        process = await start(tmp_path, server)
        await until(process, tmp_path, 10)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 130 and b"Traceback" not in errors, errors
        known = len(lines(tmp_path / "verdicts.jsonl"))
        assert 10 <= known < 80
        process = await start(tmp_path, server)
        _, errors = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, errors
    assert sorted(line["id"] for line in lines(tmp_path / "verdicts.jsonl")) == [f"q{n:03}/0" for n in range(80)]


async def test_a_judge_that_is_down_and_one_without_its_key(tmp_path):
    write(tmp_path, *many(3))
    async with FakeServer(Reply(status=500)) as server:
        process = await start(tmp_path, server)
        _, errors = await asyncio.wait_for(process.communicate(), 240)
        assert process.returncode == 2 and b"3 of 3 candidates could not be judged" in errors, errors
        process = await start(tmp_path, server, "--set", "judge.api_key_env=NO_SUCH_VARIABLE")
        _, errors = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 2 and b"NO_SUCH_VARIABLE" in errors and b"Traceback" not in errors, errors
