"""Watches one program: reads its output, keeps its limits, kills all that it started, reports."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections import namedtuple
from contextlib import suppress

from . import kernel
from .program import become, run

Job = namedtuple("Job", "order source uid namespaces counted")
TICK_S = 0.1
"""How often the memory and the processes of the whole tree are counted."""

IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""By the guard, as a program may be able to send them; its lifeline is what ends it."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


class HeadAndTail:
    """The first and the last ``limit / 2`` bytes of a stream of any length."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self.head, self._tail, self.total = bytearray(), bytearray(), 0

    def add(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self.total += len(chunk)
        room = self._half - len(self.head)
        self.head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 4 * self._half:
            del self._tail[: -self._half]

    @property
    def tail(self) -> bytes:
        """What follows the head, or the end of it."""
        return bytes(self._tail[-self._half :])


def supervise(job: Job) -> None:
    """Start the program, wait for its end or a limit, and report on stdout. In the program's process: run it."""
    output, program_output = os.pipe()
    ready, set_up = os.pipe()
    woken = _wake_on_child()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    program = os.fork()
    if program == 0:
        become(job, program_output, set_up)
        sys.exit(run(job.source))
    os.close(program_output)
    os.close(set_up)
    if sys.platform == "linux":
        kernel.hide_memory()
    started = os.read(ready, 1)
    kept = HeadAndTail(job.order.output)
    reason, value = _watch(job, program, output, woken, kept)
    _kill_all(job)
    for chunk in iter(lambda: os.read(output, 1 << 16), b""):
        kept.add(chunk)
    _report(reason if started else "failed", value, kept)


def _watch(job: Job, program: int, output: int, woken: int, kept: HeadAndTail) -> tuple[str, int]:
    """Why it ended: ``exit CODE``, ``signal NUMBER``, or the limit or event that ends it."""
    deadline = time.monotonic() + job.order.timeout
    look = time.monotonic() + TICK_S
    poll = select.poll()
    for fd in (0, output, woken):
        poll.register(fd, select.POLLIN)
    while True:
        now = time.monotonic()
        if now >= deadline:
            return "timeout", 0
        if now >= look:
            look = now + TICK_S
            broken = _broken_limit(job)
            if broken:
                return broken, 0
        for fd, _ in poll.poll(1000 * max(0.0, min(deadline, look) - now) + 1):
            if fd == 0:
                return "abandoned", 0
            chunk = os.read(fd, 1 << 16)
            if fd == output:
                kept.add(chunk)
                if not chunk:
                    poll.unregister(output)
            elif ended := _reap(program):
                return ended


def _reap(program: int) -> tuple[str, int] | None:
    """Collect ended children; how the program ended, if it is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            return ("exit", code) if code >= 0 else ("signal", -code)
        if pid == 0:
            return None


def _broken_limit(job: Job) -> str | None:
    tree = _tree(job)
    if len(tree) > job.order.processes:
        return "processes"
    return "memory" if sum(map(_memory, tree)) > job.order.memory else None


def _tree(job: Job) -> list[int]:
    """Process ids of the program and all that it started."""
    if job.namespaces:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    found = _children(os.getpid())
    for pid in found:  # grows while it is walked
        found += _children(pid)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # it has just ended, or the system has no such files
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def _memory(pid: int) -> int:
    """Bytes of memory that belong to no file."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            resident, shared = map(int, file.read().split()[1:3])
    except OSError:
        return 0
    return (resident - shared) * _PAGE


def _kill_all(job: Job) -> None:
    """Kill until no child is left; orphans become children, so nothing that the program started outlives this."""
    while True:
        if job.namespaces and os.getpid() == 1:  # -1 is all of the namespace here, and all of the machine elsewhere
            _kill(-1)
        for pid in [] if job.namespaces else _tree(job):
            _kill(pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _kill(pid: int) -> None:
    with suppress(OSError):  # it has ended; nothing that runs here has rights which the guard lacks
        os.kill(pid, signal.SIGKILL)


def _wake_on_child() -> int:
    """A file descriptor that becomes readable when a child ends."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return woken


def _report(reason: str, value: int, kept: HeadAndTail) -> None:
    head = bytes(kept.head)
    data = f"rltr-guard {reason} {value} {len(head)} {kept.total}\n".encode() + head + kept.tail
    with suppress(OSError):  # nobody may be there to read it
        while data:
            data = data[os.write(1, data) :]
    os._exit(0)
