"""Starts guards, hands them programs, and reads what became of these."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from rltr_verl.errors import ConfigError

Reason = Literal["exit", "signal", "timeout", "memory", "processes"]

SLACK_S = 15.0
"""How much longer than the program's time a guard may take to start, kill and report, on a busy machine."""

_FOLDER = str(Path(__file__).parent)
_GUARD = f"import sys; sys.path.insert(0, {_FOLDER!r}); import guard.start; guard.start.main(sys.argv[1:])"
_ENVIRONMENT = {"LANG": "C.UTF-8"}  # the guard's; nothing of the trainer's passes on
_MEGA = 1 << 20
_HEADER = re.compile(rb"rltr-guard (\w+) (\d+) (\d+) (\d+)\n")
_THREADS = ThreadPoolExecutor(max_workers=4096, thread_name_prefix="rltr-sandbox")
"""They only wait, and are started as needed. More than callers send at once, so that no call waits here in its own
time; who calls says how many programs run at once."""
_PROBE = "import os, decimal, ctypes\nif os.fork() == 0: os._exit(0)\nos.wait()\nopen('file', 'w').write('1')\n7 * 6\n"


@dataclass(frozen=True)
class Plan:
    """One way to run a program; each of ``protections`` holds under it, each of ``open`` does not."""

    name: str
    needs: str
    protections: tuple[str, ...]
    open: tuple[str, ...] = ()


_LIMITS = "limits of time, memory, processes, file size and output"
_APART = ("no network", "no sight of other processes", "no files but Python and the system's libraries", "kill of all")

PLANS = (
    Plan("namespaces", "root with CAP_SYS_ADMIN", (_LIMITS, *_APART, "a user id of its own")),
    Plan("user_namespaces", "a kernel that lets users make namespaces", (_LIMITS, *_APART)),
    Plan(
        "uid",
        "root, and a Python that other users may read",
        (_LIMITS, "a user id of its own", "kill of all that have not left for another user id"),
        ("the network", "files that all users may read"),
    ),
    Plan(
        "none",
        "nothing",
        (_LIMITS, "kill of all, unless the program kills its guard first"),
        ("the network", "files and environments of processes of the trainer's user", "signals to these processes"),
    ),
)
"""From the strongest to the weakest."""


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        timeout_s: wall seconds from its start.
        cpu_s: CPU seconds of each of its processes.
        memory_mb: address space of each process, and memory of all together.
        output_bytes: how much of its output is kept, half from the head and half from the tail.
        processes: how many at once, threads included.
        disk_mb: size of a file, and under namespaces of all files together.
    """

    timeout_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 1024
    output_bytes: int = 10_000
    processes: int = 64
    disk_mb: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ConfigError(f"a limit of {value:g}", where=name, fix="give a number above 0.")

    def arguments(self) -> list[str]:
        """As the guard takes them."""
        memory, disk = self.memory_mb * _MEGA, self.disk_mb * _MEGA
        numbers = (math.ceil(self.cpu_s), memory, self.output_bytes, self.processes, disk)
        return [str(self.timeout_s), *map(str, numbers)]


@dataclass(frozen=True)
class Outcome:
    """What became of a program: ``value`` is its exit code or the signal; ``head`` and ``tail`` are of its output.

    ``left_out`` is how many bytes between the two were dropped.
    """

    reason: Reason
    value: int
    head: str
    tail: str
    left_out: int


async def run_python(source: str, limits: Limits, plan: Plan | None = None) -> Outcome:
    """Run a program and wait for its end; cancelled, it kills the program and all that this started.

    ``plan`` is :func:`best_plan` unless given. Raises OSError where the sandbox itself fails.
    """
    loop = asyncio.get_running_loop()
    best = await loop.run_in_executor(None, best_plan) if plan is None else plan
    call = _Call(source, limits, best)
    try:
        return await loop.run_in_executor(_THREADS, call.run)
    except asyncio.CancelledError:
        call.stop()
        raise


_choosing = threading.Lock()


def best_plan() -> Plan:
    """The strongest of ``PLANS`` that works here, found by running a program under each; kept for the process."""
    with _choosing:
        return _best_plan()


@functools.cache
def _best_plan() -> Plan:
    limits = Limits(timeout_s=20.0, cpu_s=20.0)
    for plan in PLANS[:-1]:
        with contextlib.suppress(OSError):
            outcome = _Call(_PROBE, limits, plan).run()
            if outcome.reason == "exit" and outcome.head == "42\n":
                return plan
    return PLANS[-1]


class _Call:
    """One program under one guard."""

    def __init__(self, source: str, limits: Limits, plan: Plan) -> None:
        self._source = source.encode("utf-8", "surrogatepass")
        self._limits, self._plan = limits, plan
        self._lifeline, self._guards = socket.socketpair()
        self._lifeline.settimeout(SLACK_S)

    def run(self) -> Outcome:
        """Start, wait, parse the report. Raises OSError."""
        with self._lifeline, self._guards, _folder(self._plan) as folder:
            guard = self._start(folder)
            try:
                return _outcome(self._exchange(guard))
            finally:
                self.stop()
                _end(guard)

    def stop(self) -> None:
        """Cut the lifeline: the guard kills the program and ends."""
        with contextlib.suppress(OSError):
            self._lifeline.shutdown(socket.SHUT_RDWR)

    def _start(self, folder: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-X", "utf8", "-c", _GUARD, self._plan.name, *self._limits.arguments()]
        return subprocess.Popen(
            [*command, str(len(self._source))],
            cwd=folder,
            env=_ENVIRONMENT,
            stdin=self._guards.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )

    def _exchange(self, guard: subprocess.Popen[bytes]) -> bytes:
        """Send the source and read the report to its end."""
        self._guards.close()
        with contextlib.suppress(OSError):  # a guard that ended early has said why
            self._lifeline.sendall(self._source)
        assert guard.stdout is not None
        allowed = self._limits.timeout_s + SLACK_S
        deadline = time.monotonic() + allowed
        poll, report = select.poll(), bytearray()
        poll.register(guard.stdout, select.POLLIN)
        while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            chunk = os.read(guard.stdout.fileno(), 1 << 16)
            if not chunk:
                return bytes(report)
            report += chunk
        raise ConnectionError(f"the sandbox gave no report within {allowed:g} s")


def _end(guard: subprocess.Popen[bytes]) -> None:
    """See the guard end; one that does not within a while is killed, and its tree with it."""
    with guard:
        try:
            guard.wait(SLACK_S)
        except subprocess.TimeoutExpired:
            import psutil

            tree = psutil.Process(guard.pid).children(recursive=True)
            os.killpg(guard.pid, signal.SIGKILL)
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@contextlib.contextmanager
def _folder(plan: Plan) -> Iterator[str]:
    """Where the guard starts: a fresh folder that is the program's own, or under namespaces, which bring one, any."""
    if plan.name in ("namespaces", "user_namespaces"):
        yield "/"
        return
    folder = tempfile.mkdtemp(prefix="rltr-code-")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str) -> None:
    """Remove a folder even if the program took away its own rights to folders in it."""
    os.chmod(folder, 0o700)
    for path, names, _ in os.walk(folder):
        for name in names:
            inner = os.path.join(path, name)
            if not os.path.islink(inner):
                os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _outcome(report: bytes) -> Outcome:
    header = _HEADER.match(report)
    if header is None:
        raise OSError(f"the sandbox failed: {report[-500:].decode('utf-8', 'replace').strip() or 'it said nothing'}")
    value, size, total = map(int, header.groups()[1:])
    body = report[header.end() :]
    reason = header[1].decode()
    if reason == "failed":
        raise OSError(f"the sandbox could not start the program: {body[:500].decode('utf-8', 'replace').strip()}")
    if reason == "abandoned":
        raise ConnectionAbortedError("the program was stopped")
    left_out = total - len(body)
    head, tail = (body[:size], body[size:]) if left_out else (body, b"")
    return Outcome(cast(Reason, reason), value, *_texts(head, tail), left_out)


def _texts(head: bytes, tail: bytes) -> tuple[str, str]:
    """Both as text; a character that the cut went through is left out, other bytes that are no UTF-8 are replaced."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    first = decoder.decode(head, final=not tail)
    start = next((index for index, byte in enumerate(tail[:3]) if byte & 0xC0 != 0x80), 0)
    return first, tail[start:].decode("utf-8", "replace")
