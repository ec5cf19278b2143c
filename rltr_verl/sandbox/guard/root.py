"""Namespaces, and the file tree of a program: system libraries and Python read-only, an empty folder, nothing else."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from . import kernel

HOME = "/program"
"""The program's working directory; nobody keeps a Python there."""

_OLD, _AGAIN = "/.old", "/.again"
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_ETC = ("ld.so.cache", "alternatives", "localtime", "mime.types")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_ALL = kernel.NEWNS | kernel.NEWUTS | kernel.NEWIPC | kernel.NEWPID | kernel.NEWNET
_INNER_ID = 1000
_KEPT = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | 1024 | 2048  # and (DIR)NOATIME
_ST_RELATIME = 4096


def leave_namespaces(own_user: bool) -> None:
    """New namespaces for this process's children: mounts, network (without devices), processes, IPC, host name.

    ``own_user`` adds a user namespace, which is what lets an ordinary user have the others.
    """
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(_ALL | (kernel.NEWUSER if own_user else 0))
    if own_user:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{_INNER_ID} {user} 1")
        _write("/proc/self/gid_map", f"{_INNER_ID} {group} 1")


def build(disk: int) -> None:
    """Replace the file tree by one in memory of at most ``disk`` bytes, and go to its ``HOME``. Wants NEWPID, NEWNS."""
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={disk},nr_inodes=20000,mode=755")
    os.mkdir("/tmp" + _OLD)
    kernel.pivot_root("/tmp", "/tmp" + _OLD)
    os.chdir("/")
    for path in _shown():
        _show(path)
    os.makedirs("/proc")
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    _devices()
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    for folder in (HOME, "/tmp", "/dev/shm"):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o1777)
    _lock()
    os.chdir(HOME)


def _lock() -> None:
    """Keep the program from making namespaces of its own, in which it could mount memory past every limit.

    The kernel gives a user namespace to nobody whose root is not that of the mount namespace (user_namespaces(7));
    a second mount of the same tree is enough. What shared memory segments may hold is limited as well.
    """
    os.mkdir(_AGAIN)
    kernel.mount("/", _AGAIN, None, kernel.MS_BIND | kernel.MS_REC)
    os.chroot(_AGAIN)
    with suppress(OSError):  # an ordinary user may not, by kernel
        _write("/proc/sys/kernel/shmall", "0")


def _shown() -> list[str]:
    """What the program sees of the machine; a folder comes before those inside it, which need no mount of their own."""
    python = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, os.path.dirname(sys.executable)}
    python |= {os.path.realpath(path) for path in python}
    shown: list[str] = []
    for path in [*_SYSTEM, *(f"/etc/{name}" for name in _ETC), *sorted(python)]:
        if path != "/" and not any(path == top or path.startswith(top + "/") for top in shown):
            shown.append(path)
    return shown


def _show(path: str) -> None:
    source = _OLD + path
    if os.path.islink(source):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(os.readlink(source), path)
    elif os.path.exists(source):
        _bind(source, path)
        flags = os.statvfs(path).f_flag
        kept = flags & _KEPT | (
            kernel.MS_RELATIME if flags & _ST_RELATIME else 0
        )  # the kernel refuses to lift any of them
        read_only = kernel.MS_BIND | kernel.MS_REMOUNT | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("none", path, None, read_only | kept)


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, target, None, kernel.MS_BIND | kernel.MS_REC)


def _devices() -> None:
    os.makedirs("/dev")
    for name in _DEVICES:
        _bind(f"{_OLD}/dev/{name}", f"/dev/{name}")
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"/dev/{name}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
