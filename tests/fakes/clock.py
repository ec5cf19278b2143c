"""The clock of a test's event loop, put ahead by hand: what would end after an hour ends now, and nothing before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest


class Clock:
    """``ahead``: seconds that the running loop is ahead of the time. Other loops and threads know nothing of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        loop = asyncio.get_running_loop()
        passed = loop.time
        monkeypatch.setattr(loop, "time", lambda: passed() + self.ahead)


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until ``condition()`` holds."""
    while not condition():
        await asyncio.sleep(0.001)
