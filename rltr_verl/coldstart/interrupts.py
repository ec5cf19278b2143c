"""Ctrl-C and SIGTERM as an event of the loop: work ends between two steps, never in the middle of one.

A KeyboardInterrupt that is raised wherever the loop just is ends some task that nobody awaits, which then complains.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Asked(Exception):
    """The work was asked to end."""


def run_interruptibly(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """``asyncio.run(work())``; on a signal the work is cancelled and, once it has ended, KeyboardInterrupt raised."""
    try:
        return asyncio.run(_interruptible(work()))
    except _Asked:
        raise KeyboardInterrupt from None


async def _interruptible(work: Coroutine[Any, Any, T]) -> T:
    stop = asyncio.Event()
    with until_signal(stop):
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise _Asked
        finally:
            for item in (task, asked):
                item.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)


@contextmanager
def until_signal(stop: asyncio.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set ``stop``, once; a second one does what it did before. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, before = asyncio.get_running_loop(), {number: signal.getsignal(number) for number in _SIGNALS}

    def ask() -> None:
        stop.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            if loop.remove_signal_handler(number):
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    for number in _SIGNALS:
        loop.add_signal_handler(number, ask)
    try:
        yield
    finally:
        restore()
