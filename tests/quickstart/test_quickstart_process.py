"""Commands of a stage: output to a log, errors shown, no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rltr_verl.errors import StageError
from rltr_verl.quickstart.process import Command, last_errors, run_logged

# A child with a grandchild that ignores SIGTERM, as a stuck Ray worker does; both write their ids.
FAMILY = """
import os, signal, subprocess, sys, time
folder, name = sys.argv[1:]
if name == "child":
    subprocess.Popen([sys.executable, __file__, folder, "grandchild"])
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.path.join(folder, name), "w").write(str(os.getpid()))
time.sleep(600)
"""

# A quickstart-like parent that runs the family as a stage's command.
PARENT = """
import sys
from pathlib import Path
from rltr_verl.quickstart import process
process.GRACE_S = 1.0
folder = Path(sys.argv[1])
command = process.Command((sys.executable, str(folder / "family.py"), str(folder), "child"))
process.run_logged(command, folder / "log", lambda: None)
"""


def python(code: str) -> Command:
    return Command((sys.executable, "-c", code))


def test_output_goes_to_the_log_and_the_watcher_sees_the_end(tmp_path):
    seen = []
    run_logged(python("print('hello')"), tmp_path / "logs" / "x.log", lambda: seen.append(1), every_s=0.01)
    log = (tmp_path / "logs" / "x.log").read_text()
    assert log.startswith("$ ") and "\nhello\n" in log
    assert seen


def test_environment_variables_reach_the_command_and_its_text(tmp_path):
    command = Command((sys.executable, "-c", "import os; print(os.environ['GREETING'])"), {"GREETING": "a b"})
    run_logged(command, tmp_path / "log", lambda: None, every_s=0.01)
    assert "\na b\n" in (tmp_path / "log").read_text()
    assert command.text().startswith("GREETING='a b' ")


def test_the_printed_command_is_what_a_shell_would_run(tmp_path):
    command = Command((sys.executable, "-c", "import sys; print(sys.argv[1:])", "a=[x,y]", "b=it's $HOME"), {"A": "1"})
    printed = subprocess.run(["bash", "-c", command.text()], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(["a=[x,y]", "b=it's $HOME"])


def test_a_failure_shows_the_last_error_and_the_log(tmp_path):
    code = "import warnings\nwarnings.warn('noise')\nraise ValueError('the disk is made of cheese')"
    with pytest.raises(StageError) as caught:
        run_logged(python(code), tmp_path / "x.log", lambda: None, every_s=0.01)
    text = str(caught.value)
    assert "status 1" in text and "ValueError: the disk is made of cheese" in text
    assert str(tmp_path / "x.log") in text
    assert "noise" not in text


def test_errors_of_an_earlier_attempt_in_the_log_are_not_shown(tmp_path):
    for message in ("first", "second"):
        with pytest.raises(StageError) as caught:
            run_logged(python(f"raise RuntimeError('{message}')"), tmp_path / "x.log", lambda: None, every_s=0.01)
    assert "second" in str(caught.value) and "first" not in str(caught.value)


def test_last_errors_prefers_our_own_message():
    own = "[rltr_verl] ConfigError: rltr.tools: unknown tool 'x'. Fix: use search."
    text = f"noise\n{own}\nTraceback (most recent call last):\nSystemExit: 1\n"
    assert last_errors(text) == own


def test_last_errors_finds_the_exception_behind_torchruns_summary():
    text = "\n".join(
        [
            "Epoch 1:  3%|   \rEpoch 1:  4%|",
            "  File 'a.py', line 3",
            "[rank0]: RuntimeError: bad shapes",
            "E1130 api.py] failed",
        ]
        + ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "====", "x FAILED"]
    )
    assert last_errors(text).splitlines()[-1] == "[rank0]: RuntimeError: bad shapes"


def test_last_errors_keeps_a_message_of_several_lines():
    """As Hydra prints one: the cause stands below the exception's first line."""
    message = "hydra.errors.InstantiationException: Error in call to target 'x.Y':\nModuleNotFoundError(\"no_lib\")"
    text = f"Traceback (most recent call last):\n  File a.py\n{message}\n\nSet HYDRA_FULL_ERROR=1 for a full trace."
    assert last_errors(text).endswith(message)


def test_last_errors_without_any_exception_gives_the_last_lines():
    assert last_errors("\n".join(f"line {i}" for i in range(50)), limit=3) == "line 47\nline 48\nline 49"


@pytest.fixture
def family(tmp_path):
    """A running parent -> child -> grandchild; gives the parent and the ids of the others."""
    (tmp_path / "family.py").write_text(FAMILY)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stderr=subprocess.PIPE)
    ids = [_wait_for_id(tmp_path / name) for name in ("child", "grandchild")]
    yield parent, ids
    for pid in (parent.pid, *ids):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    parent.wait()


def test_an_interrupt_ends_the_whole_family(family):
    parent, ids = family
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=300)
    assert b"KeyboardInterrupt" in errors
    _wait_until_ended(*ids)


def test_a_killed_parent_takes_its_command_along(family):
    parent, (child, _) = family
    parent.kill()
    parent.wait()
    _wait_until_ended(child)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _wait_until_ended(*ids: int) -> None:
    """A killed process takes a moment to go."""
    deadline = time.monotonic() + 120
    while living := [pid for pid in ids if _alive(pid)]:
        assert time.monotonic() < deadline, living
        time.sleep(0.05)


def _wait_for_id(path: Path) -> int:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path.name} did not start")
