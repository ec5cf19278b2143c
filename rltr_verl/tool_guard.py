"""What stands before a tool, over all trajectories of a process: its limits, its rest, its cache, its figures."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cachetools import LRUCache

from rltr_verl.trajectory import Status

logger = logging.getLogger(__name__)

CACHE_ENTRIES = 4096
HUNG_LIMIT = 512
"""Bounds a tool and process (ours): kept results, and calls left behind in threads before further ones are refused."""

FAULTS = frozenset({Status.TIMEOUT, Status.INFRASTRUCTURE})
"""What lets a tool rest. ``tool_failed`` does not: the tool answered."""


@dataclass(frozen=True)
class CallLimits:
    """Limits of one tool.

    timeout_s: wall time of an attempt. retries: further attempts after ``infrastructure``. concurrency: calls at once.
    rest_after: faults in a row after which the tool rests, for rest_s. cache: results are kept.
    """

    timeout_s: float = 30.0
    retries: int = 1
    concurrency: int = 512
    rest_after: int = 20
    rest_s: float = 30.0
    cache: bool = False


class Breaker:
    """Lets a tool rest after faults in a row.

    After its rest one call tries it, and the others fail as before, until that one has ended: another fault sends the
    tool back to rest, any answer frees it.
    """

    def __init__(self, name: str, after: int, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._after, self._rest_s, self._clock = name, after, rest_s, clock
        self._faults = 0
        self._until = -1.0
        self._tried = False

    @property
    def resting(self) -> bool:
        """Whether calls are to fail at once."""
        return self._clock() < self._until

    @contextmanager
    def call(self) -> Iterator[bool]:
        """Around a call: whether it may be made."""
        rested = self._faults >= self._after
        if self.resting or (rested and self._tried):
            yield False
            return
        self._tried = rested
        try:
            yield True
        finally:
            if rested:
                self._tried = False

    def note(self, status: Status) -> bool:
        """Take account of how a call ended; True if the tool goes to rest with it."""
        if status not in FAULTS:
            self._faults, self._until = 0, -1.0
            return False
        self._faults += 1
        if self._faults < self._after or self.resting:
            return False
        self._until = self._clock() + self._rest_s
        logger.warning("tool '%s' rests %g s after %d faults in a row", self._name, self._rest_s, self._faults)
        return True


class Gate:
    """At most ``limit`` holders at once; may be used from one event loop after another."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(limit)

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._slots = loop, asyncio.Semaphore(self._limit)
        await self._slots.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._slots.release()


class ResultCache:
    """Results of a pure tool by its arguments; the least recently used go first."""

    def __init__(self, entries: int = CACHE_ENTRIES) -> None:
        self._kept: LRUCache[str, str] = LRUCache(entries)

    def get(self, arguments: Mapping[str, Any]) -> str | None:
        """The kept text, or None."""
        return self._kept.get(_key(arguments))

    def put(self, arguments: Mapping[str, Any], text: str) -> None:
        """Keep a text."""
        self._kept[_key(arguments)] = text


def _key(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True)  # tells 1 from 1.0 and "1", as the tool may


@dataclass
class ToolStats:
    """Figures of a tool since the process started.

    statuses: calls by how they ended. seconds, longest: wall time of all calls and of the longest, waits for a free
    slot included. cached: answered from the cache. retried: further attempts. rests: times it went to rest.
    """

    statuses: Counter[Status] = field(default_factory=Counter)
    seconds: float = 0.0
    longest: float = 0.0
    cached: int = 0
    retried: int = 0
    rests: int = 0

    def add(self, status: Status, seconds: float) -> None:
        """Count one call."""
        self.statuses[status] += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)

    def as_dict(self) -> dict[str, float]:
        """Plain numbers under fixed names."""
        calls = sum(self.statuses.values())
        figures = {"calls": calls, "seconds_mean": self.seconds / calls if calls else 0.0, "seconds_max": self.longest}
        counts = {"cached": self.cached, "retried": self.retried, "rests": self.rests}
        return {key: float(value) for key, value in {**figures, **counts, **self._by_status()}.items()}

    def _by_status(self) -> dict[str, int]:
        return {status.value: self.statuses[status] for status in Status}
