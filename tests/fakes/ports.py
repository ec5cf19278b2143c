"""TCP ports of this machine, for servers of tests and for servers that are not there."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_LOWEST, _HIGHEST = 10_000, 32_767
"""Below the ports that Linux gives to connections: none of these takes one that was found free."""


def free_port() -> int:
    """A port of 127.0.0.1 that can be listened on."""
    while True:
        port = random.SystemRandom().randint(_LOWEST, _HIGHEST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@contextmanager
def dead_port() -> Iterator[int]:
    """A port that refuses connections, and that nobody can take meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
