"""`make venv`: which Python it takes, and what becomes of an environment of another one. The Pythons are scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def python(path: Path, version: str, fits: bool = True) -> Path:
    """An executable that notes its arguments beside itself, and says what it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\necho "$@" >> {path}.log\n'
        f'case "$1" in --version) echo Python {version};; -c) exit {0 if fits else 1};; esac\n'
    )
    path.chmod(0o755)
    return path


def make(tmp_path: Path, interpreter: Path) -> subprocess.CompletedProcess:
    command = ["make", "-C", str(ROOT), "venv", f"PYTHON={interpreter}", f"VENV={tmp_path / 'venv'}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_another_python_is_refused_before_anything_is_made(tmp_path):
    done = make(tmp_path, python(tmp_path / "python3.13", "3.13.1", fits=False))
    assert done.returncode != 0 and not (tmp_path / "venv").exists()
    assert "python3.13 is Python 3.13.1; Python 3.10, 3.11 or 3.12 is needed. Fix: make venv PYTHON=" in done.stdout


@pytest.mark.parametrize(("there", "made_anew"), [("3.13.1", True), ("3.11.9", False)])
def test_an_environment_of_another_python_is_made_anew(tmp_path, there, made_anew):
    python(tmp_path / "venv" / "bin" / "python", there)
    interpreter = python(tmp_path / "python3.11", "3.11.9")
    done = make(tmp_path, interpreter)
    assert done.returncode == 0, done.stderr
    asked = Path(f"{interpreter}.log").read_text()
    assert (f"-m venv --clear {tmp_path / 'venv'}" in asked) is made_anew
    assert "about 2 GB of packages" in done.stdout.partition("-m pip")[0]
