"""The program's own process: what it is left with, and how its text is run."""

from __future__ import annotations

import _ast
import os
import resource
import signal
import sys

from . import kernel

TYPE_CHECKING = False  # typing takes as long to import as all the rest
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .supervise import Job

NAME = "program.py"
"""How tracebacks call the program."""

_FILES = 256


def become(job: Job, output: int, set_up: int) -> None:
    """Turn this fork into the program's process: streams, limits, privileges, environment. Ends it if that fails."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        _take_signals()
        os.setsid()
        _limit(job)
        _drop(job)
        _clean(os.getcwd())
    except (OSError, ValueError) as error:
        _give_up(error)
    os.write(set_up, b"1")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def run(source: bytes) -> int:
    """Run the text as ``__main__``; a last expression is shown as the interactive interpreter shows it.

    Returns the exit code: 0, or 1 after an exception, whose traceback is printed. SystemExit passes through.
    """
    text = source.decode("utf-8", "surrogatepass")
    module = type(sys)("__main__")
    module.__dict__.update(__builtins__=__builtins__, __file__=NAME, __loader__=_Source(text))
    sys.modules["__main__"] = module
    try:
        for code in _compiled(text):
            exec(code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        _show(error)
        return 1
    return 0


class _Source:
    """Gives tracebacks the program's lines."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_source(self, name: str) -> str:
        return self._text


def _compiled(text: str) -> list:
    tree: Any = compile(text, NAME, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    codes = [compile(tree, NAME, "exec", dont_inherit=True)]
    if last is not None:
        codes.append(compile(_ast.Interactive(body=[last]), NAME, "single", dont_inherit=True))
    return codes


def _show(error: BaseException) -> None:
    """Print the traceback, after what was printed before, without the frames of this file."""
    import traceback

    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


def _take_signals() -> None:
    """As a fresh interpreter has them."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _limit(job: Job) -> None:
    order = job.order
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: order.cpu,
        resource.RLIMIT_FSIZE: order.disk,
        resource.RLIMIT_NOFILE: _FILES,
    }
    if sys.platform == "linux":  # macOS refuses it
        limits[resource.RLIMIT_AS] = order.memory
    if job.counted:
        limits[resource.RLIMIT_NPROC] = order.processes
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        spare = 1 if which == resource.RLIMIT_CPU and value != hard else 0  # SIGXCPU, and SIGKILL a second later
        resource.setrlimit(which, (value, value + spare))


def _drop(job: Job) -> None:
    if job.uid is not None:
        if not job.namespaces:
            os.chown(os.getcwd(), job.uid, job.uid)
        os.setgroups([])
        os.setgid(job.uid)
        os.setuid(job.uid)
    if sys.platform == "linux":
        kernel.drop_privileges()
        kernel.show_memory()
        if not job.namespaces:
            kernel.die_with_parent()


def _clean(home: str) -> None:
    """An environment that says nothing about the trainer, and an interpreter that shows nothing of the guard."""
    os.environ.clear()
    os.environ.update(HOME=home, PATH="/usr/local/bin:/usr/bin:/bin", LANG="C.UTF-8")
    for library in ("OMP", "OPENBLAS", "MKL"):  # else a thread a core, each with its share of the memory limit
        os.environ[f"{library}_NUM_THREADS"] = "1"
    sys.path[0] = home
    sys.argv[:] = [NAME]
    for name in [name for name in sys.modules if name.partition(".")[0] == "guard"]:
        del sys.modules[name]
    for stream in (sys.stdout, sys.stderr):  # by lines: what was printed before a kill is not lost
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


def _give_up(error: Exception) -> NoReturn:
    os.write(2, f"{error}\n".encode())
    os._exit(1)
