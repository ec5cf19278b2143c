"""Runs a command with its output in a log file, and leaves no process behind, however it ends."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from rltr_verl.errors import StageError

GRACE_S = 12.0
"""Ray needs up to 8 s to end all its processes after SIGTERM."""

_NOISE = re.compile(r"ChildFailedError|SignalException|DistStoreError|TQ_|\bWARNING\b|UserWarning|warnings\.warn")
_OWN = re.compile(r"^\[rltr_verl\]")
_SPEAKER = r"^(?:\([^)]*\)\s*)?(?:\[rank\d+\]:\s*)?"  # Ray's and torchrun's prefixes
_EXCEPTION = re.compile(_SPEAKER + r"(?:[\w.]+\.)?\w*(?:Error|Exception|Exit|Unscored)\b(?::.*)?$")
_ELSEWHERE = re.compile(r"Traceback|[IWEF]\d{4} |\s+File |\[|\(|[-=]{5,}|During handling|The above exception")
_MESSAGE_LINES = 5
_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Command:
    """A command with the environment variables it needs beside the caller's."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """For a shell, one option a line."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        words = [shlex.quote(word) for word in self.argv]
        head = [word for word in words if "=" not in word or word.startswith("--nproc")]
        lines = [" ".join([*variables, *head]), *(word for word in words if word not in head)]
        return " \\\n    ".join(lines)


def run_logged(command: Command, log: Path, watch: Callable[[], None], every_s: float = 0.3) -> None:
    """Run a command to its end.

    Args:
        command: is started in a session of its own, so that Ctrl-C reaches only this process, which then ends it.
        log: gets its output, appended; the command stands above it.
        watch: called every ``every_s`` seconds while it runs, and once behind its end.

    Raises:
        StageError: it ended with another status than 0; holds the last error lines of the log.
        KeyboardInterrupt: passed on after all processes of the command have ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ {command.text()}\n".encode())
        output.flush()
        start = output.tell()
        process = _start(command, output)
        try:
            while process.poll() is None:
                watch()
                time.sleep(every_s)
        finally:
            with _uninterrupted():
                stop_tree(process)
    watch()
    if process.returncode != 0:
        raise _failure(process.returncode, log, start)


def stop_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and all its descendants: first asked to, after :data:`GRACE_S` seconds made to."""
    everyone = _session(process.pid)
    if process.poll() is None:
        everyone += _descendants(process.pid)
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    if process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    _, alive = psutil.wait_procs(everyone, max(0.1, deadline - time.monotonic()) if everyone else 0)
    for one in {*alive, *_session(process.pid)}:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def last_errors(text: str, limit: int = 12) -> str:
    """What a user should read of a failed command's output.

    Our own one-paragraph errors if there are any; else the last exception with the lines right above it; else the
    last lines.
    """
    lines = [line.rstrip() for line in text.replace("\r", "\n").splitlines()]
    own = [line for line in lines if _OWN.match(line)]
    if own:
        return "\n".join(dict.fromkeys(own[-limit:]))
    useful = [line for line in lines if not _NOISE.search(line)]
    ends = [index for index, line in enumerate(useful) if _EXCEPTION.match(line)]
    end = _end_of_message(useful, ends[-1]) if ends else len(useful)
    return "\n".join([line for line in useful[:end] if line][-limit:])


def _end_of_message(lines: Sequence[str], start: int) -> int:
    """Behind the exception's message, which may go on below its first line: up to a blank line or something else."""
    for index in range(start + 1, min(start + 1 + _MESSAGE_LINES, len(lines))):
        if not lines[index] or _ELSEWHERE.match(lines[index]):
            return index
    return min(start + 1 + _MESSAGE_LINES, len(lines))


def _start(command: Command, output: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command.argv,
        env={**os.environ, **command.env},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )


def _die_with_parent() -> None:
    """In the child: the kernel sends it SIGTERM when the parent is gone, even if that was killed."""
    _LIBC.prctl(_PDEATHSIG, signal.SIGTERM)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not leave processes behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _session(pid: int) -> list[psutil.Process]:
    """Living processes of the session that ``pid`` leads: also those whose parent has already gone."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if process.pid != pid and os.getsid(process.pid) == pid:
                found.append(process)
    return found


def _failure(status: int, log: Path, start: int) -> StageError:
    with log.open("rb") as file:
        file.seek(start)
        text = file.read().decode("utf-8", "replace")
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    problem = f"the command {how}. Its last error lines:\n\n{_indented(last_errors(text).splitlines())}\n"
    return StageError(problem, fix=f"the whole output is in {log}; then run the same command again, it goes on here.")


def _indented(lines: Iterable[str] | Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)
