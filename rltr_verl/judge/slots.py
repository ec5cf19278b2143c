"""A bound on concurrent requests that holds over all processes of a node.

One file per bound holds the locks: byte ``i`` is slot ``i``, and who locks it (POSIX ``fcntl``) may send a request. The
kernel frees the locks of a process that dies. Behind the slots the file holds a table with one entry per process that
waits: how many slots it has and wants together. From the table every process reads its fair share; one that has more
gives back a slot with each request that ends, and one that has less takes free slots, looking every 20 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import random
import resource
import tempfile
import threading
from array import array
from collections import deque
from functools import cache
from pathlib import Path

from rltr_verl.errors import ConfigError

_LOG = logging.getLogger(__name__)
_TICK_S = 0.02
_TURN_S = 0.25
"""Where there are more processes than slots, a process gives a slot back after this long."""
_MEMBERS = 256
_TABLE = 1 << 20  # the table's first byte; slots are below
_WIDTH = 4
_SPARE_FILES = 64  # for all else that the process may open


class NodeSlots:
    """At most ``limit`` slots in use over all processes of this node (and user) that give the same ``name``.

    Use as an asynchronous context manager, or with :meth:`acquire` and :meth:`release`; belongs to one event loop at a
    time. A process whose limit of open files is too low for ``limit`` uses fewer, with a warning.

    Args:
        limit: slots; processes with different limits share the lower slots.
        name: what is bounded, e.g. the judge's URLs.
        sockets: files that a slot may need.

    Raises:
        ConfigError: the folder for the lock files cannot be used, or hardly a file can be opened.
    """

    def __init__(self, limit: int, name: str, *, sockets: int = 1) -> None:
        self.limit = limit
        self.local_limit = _openable(limit, sockets)
        self._ledger = _ledger(_folder() / hashlib.sha256(name.encode()).hexdigest()[:32])
        self._held: deque[tuple[int, float]] = deque()  # slot and since when, oldest first
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._member: int | None = None
        self._poller: asyncio.Task[None] | None = None
        self._share, self._crowded, self._read_at, self._away_until = limit, False, -1.0, 0.0

    @property
    def in_use(self) -> int:
        """Slots of this object."""
        return len(self._held)

    async def __aenter__(self) -> NodeSlots:
        await self.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    async def acquire(self, deadline: float | None = None) -> None:
        """Wait for a slot; raises asyncio.TimeoutError at ``deadline`` (the running loop's clock)."""
        loop = asyncio.get_running_loop()
        if not self._waiters and self._take(loop.time()):
            return
        waiter = loop.create_future()
        expiry = loop.call_at(deadline, _expire, waiter) if deadline is not None else None
        self._waiters.append(waiter)
        self._watch(loop)
        try:
            await waiter
        except BaseException:
            self._leave(waiter)
            raise
        finally:
            if expiry:
                expiry.cancel()

    def release(self) -> None:
        """Give one slot to the next who waits here, or back where others are owed one."""
        slot, since = self._held.popleft()
        now = asyncio.get_running_loop().time()
        if self._keeps(since, now) and self._grant():
            self._held.append((slot, since))
        else:
            self._ledger.free(slot)

    def close(self) -> None:
        """Free every slot and leave the table; who still waits is cancelled."""
        while self._waiters:
            self._waiters.popleft().cancel()
        if self._poller:
            self._poller.cancel()
            self._poller = None
        while self._held:
            self._ledger.free(self._held.popleft()[0])
        self._unregister()

    def _keeps(self, since: float, now: float) -> bool:
        self._look(now)
        if self._crowded and now - since > _TURN_S:
            self._away_until = now + _TICK_S * random.uniform(2, 4)
            return False
        return len(self._held) < min(self._share, self.local_limit)

    def _take(self, now: float) -> bool:
        """Lock a free slot, within this process's share."""
        self._look(now)
        if now < self._away_until or len(self._held) >= min(self._share, self.local_limit):
            return False
        slot = self._ledger.take(self.limit)
        if slot is None:
            return False
        self._held.append((slot, now))
        return True

    def _grant(self) -> bool:
        """Wake the next who waits; False if nobody does."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return True
        return False

    def _leave(self, waiter: asyncio.Future[None]) -> None:
        """A waiter was cancelled or has expired: it gives back what it may just have got."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        elif waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self.release()

    def _look(self, now: float) -> None:
        """Read from the table what the others want, at most once a tick."""
        if now - self._read_at < _TICK_S:
            return
        self._read_at = now
        others = self._ledger.wanted(self._member)
        mine = len(self._held) + max(1, len(self._waiters))
        self._share = fair_share(self.limit, mine, others) if others else self.limit
        self._crowded = len(others) >= self.limit

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._poller is None or self._poller.done():
            self._poller = loop.create_task(self._poll())

    async def _poll(self) -> None:
        """While somebody waits here: tell the others, and take what is free and due."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiters:
                self._register()
                while self._waiters and self._take(loop.time()):
                    if not self._grant():
                        self.release()
                await asyncio.sleep(_TICK_S * random.uniform(0.8, 1.2))
        finally:
            self._unregister()

    def _register(self) -> None:
        if self._member is None:
            self._member = self._ledger.join()
        if self._member is not None:
            self._ledger.tell(self._member, len(self._held) + len(self._waiters))

    def _unregister(self) -> None:
        if self._member is not None:
            self._ledger.part(self._member)
            self._member = None


def fair_share(limit: int, mine: int, others: list[int]) -> int:
    """Slots due to one who wants ``mine`` beside ``others``: who wants less than an equal part gets all it wants, and
    the rest is divided equally among the others, rounded up (so that none stays unused); at least 1."""
    left, rest = limit, sorted([mine, *others])
    while rest:
        part = left / len(rest)
        if rest[0] > part or rest[0] >= mine:
            return max(1, -(-left // len(rest)))
        left -= rest.pop(0)
    return max(1, left)


class _Ledger:
    """The lock file of one bound in this process.

    POSIX locks belong to the process and its file, and closing any descriptor of that file drops them all: so there is
    one descriptor, it is never closed, and what this process itself holds is kept in ``_mine``.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        self._mine: set[int] = set()
        self._guard = threading.Lock()

    def take(self, limit: int) -> int | None:
        """Lock one of the first ``limit`` bytes that is free; None if none is."""
        first = random.randrange(limit)
        for number in range(limit):
            slot = (first + number) % limit
            if self._lock(slot):
                return slot
        return None

    def free(self, byte: int) -> None:
        """Unlock a byte of this process."""
        with self._guard:
            self._mine.discard(byte)
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)

    def join(self) -> int | None:
        """An entry of the table for a process that waits; None if all are taken."""
        return next((entry for entry in range(_MEMBERS) if self._lock(_place(entry))), None)

    def tell(self, entry: int, wanted: int) -> None:
        """Write how many slots are held and waited for."""
        os.pwrite(self._file, wanted.to_bytes(_WIDTH, "little"), _place(entry))

    def part(self, entry: int) -> None:
        """Give the entry back."""
        self.tell(entry, 0)
        self.free(_place(entry))

    def wanted(self, own: int | None) -> list[int]:
        """What the other living entries want."""
        table = array("I", self._table())
        found = [(entry, value) for entry, value in enumerate(table) if value and entry != own]
        return [value for entry, value in found if self._lives(entry)]

    def _table(self) -> bytes:
        raw = os.pread(self._file, _MEMBERS * _WIDTH, _TABLE)
        return raw[: len(raw) - len(raw) % _WIDTH]

    def _lives(self, entry: int) -> bool:
        """Whether its process does; an entry that a dead one left behind is cleared."""
        place = _place(entry)
        if place in self._mine:
            return True
        if not self._lock(place):
            return True
        self.part(entry)
        return False

    def _lock(self, byte: int) -> bool:
        with self._guard:
            if byte in self._mine:
                return False
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            except (BlockingIOError, PermissionError):
                return False
            self._mine.add(byte)
            return True


@cache
def _ledger(path: Path) -> _Ledger:
    try:
        return _Ledger(path)
    except OSError as error:
        raise _unusable(path, str(error)) from None


os.register_at_fork(after_in_child=_ledger.cache_clear)  # a child inherits no lock


def _folder() -> Path:
    """The user's own folder for lock files, on this node."""
    folder = Path(tempfile.gettempdir()) / f"rltr_slots_{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.lstat().st_uid
    except OSError as error:
        raise _unusable(folder, str(error)) from None
    if owner != os.getuid():
        raise _unusable(folder, "it belongs to another user")
    return folder


def _unusable(path: Path, why: str) -> ConfigError:
    fix = "free the path, or set TMPDIR to a local folder that you may write to."
    return ConfigError(f"the judge's lock files cannot be kept there ({why})", where=str(path), fix=fix)


def _openable(limit: int, sockets: int) -> int:
    """``limit``, or as many slots as this process can open files for."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return limit
    room = (allowed - _open_files() - _SPARE_FILES) // sockets
    if room >= limit:
        return limit
    _LOG.warning(
        "The limit of requests (concurrency) is %d, but this process may open %d files: it sends at most %d at once. "
        "Raise the limit (ulimit -n).",
        limit,
        allowed,
        max(1, room),
    )
    return max(1, room)


def _open_files() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return _SPARE_FILES


def _place(entry: int) -> int:
    return _TABLE + entry * _WIDTH


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(asyncio.TimeoutError())
