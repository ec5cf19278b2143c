"""From the command line to a supervised program, by one of four plans (see ``rltr_verl.sandbox.PLANS``)."""

from __future__ import annotations

import os
import sys
from collections import namedtuple

from . import kernel, root
from .supervise import Job, supervise

Order = namedtuple("Order", "plan timeout cpu memory output processes disk length")
_FIRST_UID = 1 << 30  # far above any user's; one for each guard that lives at the same time


def main(arguments: list[str]) -> None:
    """Run one program and report. Does not return in the program's process until the program has ended."""
    order = Order(arguments[0], float(arguments[1]), *map(int, arguments[2:]))
    source = _read(0, order.length)
    uid = _FIRST_UID + os.getpid() if order.plan in ("namespaces", "uid") else None
    namespaces = order.plan in ("namespaces", "user_namespaces")
    if namespaces:
        _move(own_user=uid is None)
        root.build(order.disk)
    elif sys.platform == "linux":
        kernel.adopt_orphans()
    # A user's processes are counted apart from those outside only under a uid of their own or, since Linux 5.14, in a
    # user namespace. Elsewhere the limit would count the trainer's threads.
    counted = uid is not None or (namespaces and _linux() >= (5, 14))
    supervise(Job(order, source, uid, namespaces, counted))


def _move(own_user: bool) -> None:
    """Go on as the first process of new namespaces; the process that was here waits for it and ends."""
    root.leave_namespaces(own_user)
    child = os.fork()
    if child:
        os.close(0)
        _, status = os.waitpid(child, 0)
        os._exit(0 if status == 0 else 1)
    kernel.die_with_parent()


def _read(fd: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = os.read(fd, length - len(data))
        if not chunk:
            sys.exit("the program's text ended early")
        data += chunk
    return data


def _linux() -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in os.uname().release.split(".")[:2])
