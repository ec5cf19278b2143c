"""Finding out whether processes are gone: a number that is unlike any other's in their command line marks them."""

from __future__ import annotations

import random
import time

import psutil


def unique(seconds: float) -> float:
    """About as many seconds, but as nobody else has."""
    return round(seconds + random.uniform(0, 0.01), 9)


def living(mark: float) -> list[psutil.Process]:
    """Processes, zombies aside, with the mark in their command line; a fork has that of its parent."""
    return [process for process in psutil.process_iter() if _is_marked(process, str(mark))]


def gone(mark: float, within: float = 120.0) -> bool:
    """Whether no such process is left, at once or soon."""
    deadline = time.monotonic() + within
    while living(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def zombies() -> list[psutil.Process]:
    """Ended children of this process that nobody has waited for."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.is_running() and child.status() == psutil.STATUS_ZOMBIE]


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return any(mark in part for part in process.cmdline())
    except psutil.Error:
        return False
