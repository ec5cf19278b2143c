"""Sampling on Ray: two workers on this machine, real processes, one of them killed half-way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from rltr_verl.coldstart.ray_pool import share_of
from tests.coldstart.sampling_kit import Kit, lines_of, towns, write_queries
from tests.coldstart.test_sample_cli import RLTR
from tests.fakes.planner_server import ROOT, planner_server

ROWS = towns(60)
WANTED = sorted(f"{row['id']}/{number}" for row in ROWS for number in range(4))


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    return Kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture(scope="module")
def server():
    with planner_server(latency_ms=60) as url:
        yield url


@pytest.fixture
def started(kit, server, tmp_path):
    """``started(...)``: the command, running."""
    processes = []

    def start(*options, url=server, model=kit.model, ray="local"):
        queries = write_queries(tmp_path / "q.jsonl", *ROWS)
        settings = [f"tools=[{kit.tool}]", f"teacher.base_url={url}", "teacher.model=m", "teacher.concurrency=6"]
        changes = [word for item in settings for word in ("--set", item)]
        place = [str(queries), "--dir", str(tmp_path / "cs"), "--model", str(model), "-n", "4"]
        argv = [*RLTR, "coldstart", "sample", *place, "--ray", ray, *changes, *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        processes.append(subprocess.Popen(argv, cwd=ROOT, **pipes))
        return processes[-1]

    start.folder = tmp_path / "cs"
    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def until_lines(process: subprocess.Popen, folder: Path, lines: int) -> None:
    file, deadline = folder / "samples.jsonl", time.monotonic() + 240
    while not file.exists() or file.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def workers_of(process: subprocess.Popen) -> list[psutil.Process]:
    """Processes of the pool's workers."""
    below = psutil.Process(process.pid).children(recursive=True)
    return [child for child in below if child.is_running() and any("_Worker" in part for part in child.cmdline())]


def test_a_worker_that_is_killed_half_way_loses_nothing_and_doubles_nothing(started):
    process = started("--ray-workers", "2")
    until_lines(process, started.folder, 60)
    workers = workers_of(process)
    assert len(workers) == 2
    os.kill(workers[0].pid, signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    lines = lines_of(started.folder)
    assert sorted(line["id"] for line in lines) == WANTED
    assert {line["outcome"] for line in lines} == {"ok"}
    assert "A Ray worker died" in err
    assert "Traceback" not in err and "(raylet)" not in err and "INFO" not in err and len(err.splitlines()) < 5, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_goes_on_without_ray(started, number):
    process = started()
    until_lines(process, started.folder, 20)
    below = psutil.Process(process.pid).children(recursive=True)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal sends Ctrl-C
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "interrupted: " in err, err
    done = len(lines_of(started.folder))
    assert 20 <= done < len(WANTED)
    assert not psutil.wait_procs(below, timeout=300)[1]
    argv = [word for word in process.args if word not in ("--ray", "local")]
    assert subprocess.run(argv, cwd=ROOT, capture_output=True, timeout=240).returncode == 0
    assert sorted(line["id"] for line in lines_of(started.folder)) == WANTED


def test_a_worker_that_cannot_build_its_teacher_is_one_clear_error(started):
    process = started("--set", "teacher.api_key_env=NO_SUCH_VARIABLE")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2 and "NO_SUCH_VARIABLE" in err and "Traceback" not in err


def test_no_cluster_is_one_clear_error(started):
    process = started(ray="127.0.0.1:1")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2 and "--ray 127.0.0.1:1: no Ray cluster there" in err and "Traceback" not in err


@pytest.mark.parametrize(("nodes", "part"), [(1, 64), (2, 32), (3, 21), (100, 1)])
def test_the_limit_is_that_of_the_pool(kit, nodes, part):
    assert share_of(kit.settings(concurrency=64), nodes).teacher.concurrency == part
