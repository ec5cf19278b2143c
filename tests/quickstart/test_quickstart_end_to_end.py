"""The whole quickstart with few steps: interrupted in RL, resumed to its end, and finished work never redone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = """
import sys
from pathlib import Path
from rltr_verl.quickstart import Options, run_quickstart
from rltr_verl.quickstart.options import GateLimits
from rltr_verl.world import WorldSizes

sizes = WorldSizes(train=100, val=30, val_unseen=14, coldstart=200)
nothing_asked = GateLimits(format_ok=0.0, multi_call=0.0)
run_quickstart(Options(out=Path(sys.argv[1]), sft_steps=6, rl_steps=12, sizes=sizes, gate=nothing_asked))
"""
LONGEST_S = 900


def start(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )


def stages(out: Path) -> dict:
    return json.loads((out / "state.json").read_text())["stages"]


def wait_until(condition, what: str, child: subprocess.Popen) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        assert child.poll() is None, child.communicate()[0]
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.2)


def processes_of(out: Path) -> list[str]:
    """Command lines of living processes that name the run's folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(out) in line and process.pid != os.getpid():
            found.append(line)
    return found


def test_interrupted_in_rl_and_resumed(tmp_path):
    out = tmp_path / "run"
    first = start(out)
    try:
        wait_until(lambda: (out / "rl" / "latest_checkpointed_iteration.txt").exists(), "an RL checkpoint", first)
        first.send_signal(signal.SIGINT)
        text, _ = first.communicate(timeout=300)
    finally:
        first.kill()
    assert first.returncode != 0 and "KeyboardInterrupt" in text
    assert processes_of(out) == []
    done = {name: stage.get("done", False) for name, stage in stages(out).items()}
    assert done == {"world": True, "coldstart": True, "gate": True, "before": True, "rl": False}

    second = start(out)
    text, _ = second.communicate(timeout=LONGEST_S)
    assert second.returncode == 0, text
    assert text.count("done before") == 4
    attempts = {name: stage["attempts"] for name, stage in stages(out).items()}
    assert attempts == {"world": 1, "coldstart": 1, "gate": 1, "before": 1, "rl": 2, "after": 1, "report": 1}
    resumed = [json.loads(line)["step"] for line in (out / "metrics" / "rl-002.jsonl").read_text().splitlines()]
    assert resumed == [11, 12]

    summary = json.loads((out / "summary.json").read_text())
    assert summary["rl_steps"] == 12 and summary["sft_steps"] == 6 and summary["interruptions"] == 1
    assert 0 <= summary["completeness_before"] <= 1 and 0 <= summary["completeness_unseen_after"] <= 1
    assert (out / "report.html").exists() and (out / "curves.png").exists()
    assert "all of val_unseen" in text

    third = start(out)
    text, _ = third.communicate(timeout=500)
    assert third.returncode == 0 and text.count("done before") == 7 and "all of val_unseen" in text


def test_a_failing_stage_shows_verls_error_and_keeps_what_is_done(tmp_path):
    out = tmp_path / "run"
    program = PROGRAM.replace(
        "rl_steps=12", "rl_steps=2, overrides=('actor_rollout_ref.model.external_lib=no_such_lib',)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(out)], capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    assert run.returncode != 0
    assert "StageError" in run.stderr
    assert "No module named 'no_such_lib'" in run.stderr
    assert str(out / "logs" / "rl.log") in run.stderr
    assert stages(out)["gate"]["done"] and not stages(out)["rl"].get("done", False)
    assert processes_of(out) == []
