"""The few system calls that Python does not wrap, through ctypes. All raise OSError."""

from __future__ import annotations

import ctypes
import os

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 32, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000

_PDEATHSIG, _DUMPABLE, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave the namespaces in ``flags``; NEWPID counts from the next fork."""
    _call("unshare", flags)


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    _call(
        "mount", os.fsencode(source), os.fsencode(target), kind and kind.encode(), ctypes.c_ulong(flags), data.encode()
    )


def unmount(target: str) -> None:
    """Detach a mount and all below it."""
    _call("umount2", os.fsencode(target), MNT_DETACH)


def pivot_root(new: str, old: str) -> None:
    """Make ``new`` the root; the present root is then at ``old``."""
    _call("pivot_root", os.fsencode(new), os.fsencode(old))


def die_with_parent() -> None:
    """SIGKILL for this process when its parent ends."""
    _prctl(_PDEATHSIG, 9)


def hide_memory() -> None:
    """No process of the same user may read this one's memory or environment, or trace it."""
    _prctl(_DUMPABLE, 0)


def show_memory() -> None:
    """Undo :func:`hide_memory`, which a change of user id also brings: a process may then read its own /proc files."""
    _prctl(_DUMPABLE, 1)


def adopt_orphans() -> None:
    """Descendants whose parent has ended become children of this process."""
    _prctl(_SUBREAPER, 1)


def drop_privileges() -> None:
    """Give up all capabilities, and the means to gain any by executing a file."""
    _prctl(_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _prctl(option: int, value: int) -> None:
    _call("prctl", option, *(ctypes.c_ulong(number) for number in (value, 0, 0, 0)))


def _call(name: str, *arguments: object) -> None:
    try:
        function = getattr(_libc, name)
    except AttributeError:
        raise OSError(f"{name}: not in this C library") from None
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
