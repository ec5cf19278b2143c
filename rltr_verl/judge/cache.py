"""Verdicts on disk, shared by all reward workers of a node.

One SQLite file in WAL mode (``diskcache``): readers never wait, writers take turns. The folder must be on a local disk,
since WAL does not work over a network file system. Only readable verdicts are stored, so a judge's failure is never
replayed. Values are JSON text and nothing of the folder is ever unpickled.

Whatever happens to the disk after the start, scoring goes on: a verdict that cannot be written is kept in memory and
tried again, one that cannot be read is asked for again, and one warning says so.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from diskcache import Cache, Disk, Timeout

from rltr_verl.config import CacheSettings
from rltr_verl.errors import CacheMiss, ConfigError, DiskError

_LOG = logging.getLogger(__name__)
_WHERE = "rltr.judge.cache.dir"
_FORMAT = 1
_MARK, _LOCK, _STORE = "rltr_verdicts.json", "rltr_lock", "rltr_verdicts"
_BUSY_S = 0.025  # the event loop waits this long for another process's write, at most
_REST_S = 1.0  # between attempts at a disk that did not take the last write
_MAX_LATE = 20_000
_BATCH = 256
_SELECT = "SELECT value FROM Cache WHERE key = ? AND raw = 1 AND mode = 1"


class PlainDisk(Disk):
    """Texts and numbers inside the SQLite file. A pickled or filed value reads as None: the folder holds no code."""

    def fetch(self, mode: int, filename: str | None, value: Any, read: bool) -> Any:
        """The stored value if it is text or a number."""
        return value if isinstance(value, (str, int, float)) else None


def build_cache(settings: CacheSettings) -> VerdictCache | None:
    """The cache that ``rltr.judge.cache`` describes; None without a folder. Raises as :class:`VerdictCache`."""
    return None if settings.dir is None else VerdictCache(settings)


class VerdictCache:
    """Verdicts by the SHA-256 of all that they depend on.

    Modes: ``use`` reads and writes, ``record`` writes only, ``replay`` reads only and refuses a miss. A store that
    cannot be read as SQLite is set aside under another name, with a warning, except in replay.

    Raises:
        ConfigError: the folder holds something else or a cache of another format, or (replay) no readable cache.
        DiskError: the folder cannot be made, or (record) not be written to.
    """

    def __init__(self, settings: CacheSettings) -> None:
        if settings.dir is None:
            raise ConfigError("no folder is given", where=_WHERE, fix=f"set {_WHERE}=FOLDER.")
        self.folder, self.mode = Path(settings.dir).expanduser().absolute(), settings.mode
        self._late: dict[str, str] = {}  # finished verdicts that are not on disk yet
        self._rest_until = 0.0
        self._warned: set[str] = set()
        _require_own_folder(self.folder, make=self.mode != "replay")
        # An empty diskcache is falsy, hence every "is None".
        self._writer = None if self.mode == "replay" else self._open(int(settings.size_gb * 2**30))
        self._fetch = _reader(self.folder, self.mode) if self._writer is None else self._writer.get

    @staticmethod
    def key(
        *,
        model: str | None,
        prompt_version: str,
        sampling: Mapping[str, Any],
        vote: int,
        messages: Sequence[Mapping[str, Any]],
    ) -> str:
        """SHA-256 (hex) of the canonical JSON of the arguments: 1 and 1.0 differ, the order of keys does not matter.

        Args:
            sampling: every setting that changes what a reply may be.
            vote: number of the vote, so that N votes are N entries.
            messages: the prompt, with the random token of its delimiters replaced by a constant.
        """
        plain = [dict(message) for message in messages]
        parts = [model, prompt_version, dict(sampling), vote, plain]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def get(self, key: str) -> dict[str, Any] | None:
        """What was stored under ``key``; None on a miss and always in mode ``record``.

        Raises:
            CacheMiss: nothing readable is stored, in mode ``replay``.
        """
        if self.mode == "record":
            return None
        value = _verdict_in(self._late.get(key) or self._stored(key))
        if value is None and self.mode == "replay":
            fix = "record it first with rltr.judge.cache.mode=use or record; settings and prompt must be the same."
            raise CacheMiss(f"no verdict is recorded for this request ({key[:12]})", where=str(self.folder), fix=fix)
        return value

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Store a readable verdict, over an earlier one; does nothing in mode ``replay``.

        On disk when this returns, unless the disk is busy or refuses: then it is tried again with later ones. Waits at
        most 25 ms for other processes.

        Args:
            value: JSON; ``value["verdict"]`` is a number in [0, 1].

        Raises:
            ValueError: there is no such verdict. Failures and unreadable replies must never be stored.
        """
        if not _is_verdict(value.get("verdict")):
            raise ValueError(f"only readable verdicts are stored, not {value.get('verdict')!r}")
        if self.mode == "replay":
            return
        self._late[key] = json.dumps(dict(value), separators=(",", ":"))
        if time.monotonic() >= self._rest_until:
            self._write()
        self._bound_late()

    def close(self, patience_s: float = 5.0) -> None:
        """Write what is still in memory, for at most ``patience_s`` seconds, and close the files."""
        end = time.monotonic() + patience_s
        while self._late and not self._write_all() and time.monotonic() < end:
            time.sleep(0.05)
        if self._late:
            self._warn("write", f"{len(self._late)} verdicts could not be written")
        if self._writer is not None:
            self._writer.close()

    def _open(self, size: int) -> Cache | None:
        """The store for writing; None if the folder is read-only or the disk full."""
        store = self.folder / _STORE
        try:
            with _locked(self.folder / _LOCK):
                try:
                    return open_store(store, size_limit=size)
                except sqlite3.DatabaseError as error:
                    if isinstance(error, sqlite3.OperationalError):
                        raise
                    _set_aside(store, error)
                return open_store(store, size_limit=size)
        except (OSError, sqlite3.OperationalError, Timeout) as error:
            if self.mode == "record":
                fix = "choose a folder that can be written to, with room."
                raise DiskError(f"'{self.folder}' cannot be written ({error})", where=_WHERE, fix=fix) from None
            self._warn("write", str(error))
            return None

    def _write(self) -> bool:
        """Try to write what is in memory, a batch of it in one transaction."""
        batch = list(islice(self._late.items(), _BATCH))
        if self._writer is None or not self._store(self._writer, batch):
            self._rest_until = time.monotonic() + _REST_S
            return False
        for key, _ in batch:
            del self._late[key]
        return True

    def _write_all(self) -> bool:
        while self._late:
            if not self._write():
                return False
        return True

    def _store(self, writer: Cache, batch: list[tuple[str, str]]) -> bool:
        try:
            with writer.transact():
                for key, text in batch:
                    writer.set(key, text)
        except Timeout:
            return False
        except (OSError, sqlite3.Error) as error:
            # A failed COMMIT can leave the transaction open, and with it the lock that all other processes wait for.
            writer.close()
            self._warn("write", str(error))
            return False
        return True

    def _stored(self, key: str) -> Any:
        try:
            return self._fetch(key)
        except (OSError, sqlite3.Error, Timeout) as error:
            self._warn("read", str(error))
            return None

    def _bound_late(self) -> None:
        while len(self._late) > _MAX_LATE:
            self._warn("write", f"{_MAX_LATE} verdicts are waiting for the disk; the oldest are dropped")
            del self._late[next(iter(self._late))]

    def _warn(self, what: str, reason: str) -> None:
        if what not in self._warned:
            _LOG.warning("the judge's cache %s cannot %s verdicts: %s. Scoring goes on.", self.folder, what, reason)
            self._warned.add(what)


def open_store(folder: Path, **settings: Any) -> Cache:
    """A ``diskcache`` store made for many small values and several processes; waits 25 ms for a lock, not more."""
    # Values never go to files of their own, and a process keeps at most 8 MiB of pages.
    own = {"disk_min_file_size": 2**40, "sqlite_cache_size": 2**11, "eviction_policy": "least-recently-stored"}
    return Cache(str(folder), timeout=_BUSY_S, disk=PlainDisk, statistics=0, **own, **settings)


def _require_own_folder(folder: Path, make: bool) -> None:
    """Check the mark that a cache folder carries; with ``make``, an empty or missing folder gets one."""
    mark = folder / _MARK
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and make and all(name.startswith("rltr_") for name in os.listdir(folder)):
            _write_mark(mark)
        found = json.loads(mark.read_text(encoding="utf-8")).get("format") if mark.exists() else None
    except OSError as error:
        fix = "choose a folder that you own, on a disk with room, or null."
        raise DiskError(f"'{folder}' cannot be used ({error.strerror})", where=_WHERE, fix=fix) from None
    except (ValueError, AttributeError):
        found = "unreadable"
    if found is None:
        problem = "holds other files and no cache" if make else "holds no cache"
        fix = "choose an empty folder." if make else "give the folder of a recorded cache."
        raise ConfigError(f"'{folder}' {problem}", where=_WHERE, fix=fix)
    if found != _FORMAT:
        fix = "choose another folder, or delete this one."
        raise ConfigError(f"the cache in '{folder}' has format {found}, not {_FORMAT}", where=_WHERE, fix=fix)


def _write_mark(mark: Path) -> None:
    part = mark.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"format": _FORMAT}), encoding="utf-8")
    part.replace(mark)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes while a store is opened or set aside."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _set_aside(store: Path, error: sqlite3.DatabaseError) -> None:
    aside = store.with_name(f"{store.name}.broken-{time.time_ns()}")
    store.rename(aside)
    _LOG.warning("the verdicts in %s cannot be read (%s); they are set aside as %s.", store, error, aside.name)


def _reader(folder: Path, mode: str) -> Callable[[str], str | None]:
    """Look-up that writes nothing, not even a lock; in replay a store that cannot be read is refused."""
    path = folder / _STORE / "cache.db"
    try:
        connection = _connect(path)
    except sqlite3.Error as error:
        if mode != "replay":
            return lambda key: None
        fix = "give the folder of a recorded cache."
        raise ConfigError(f"the verdicts in '{path}' cannot be read ({error})", where=_WHERE, fix=fix) from None

    def fetch(key: str) -> str | None:
        row = connection.execute(_SELECT, (key,)).fetchone()
        return row[0] if row else None

    return fetch


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"file:{quote(str(path))}?mode=ro"
    with suppress(sqlite3.OperationalError):
        return _checked(sqlite3.connect(uri, uri=True, check_same_thread=False))
    # A file in WAL mode on a read-only disk can only be opened by promising that nobody writes to it.
    return _checked(sqlite3.connect(uri + "&immutable=1", uri=True, check_same_thread=False))


def _checked(connection: sqlite3.Connection) -> sqlite3.Connection:
    connection.execute(_SELECT, ("",)).fetchone()
    return connection


def _verdict_in(text: Any) -> dict[str, Any] | None:
    """The stored value; None where the text is damaged, which is a miss and never a verdict."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        return None
    return value if isinstance(value, dict) and _is_verdict(value.get("verdict")) else None


def _is_verdict(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
