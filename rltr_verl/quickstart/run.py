"""One run: checks first, then the stages that are not done yet."""

from __future__ import annotations

import shlex
import shutil
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape

from rltr_verl._compose import compose_recipe
from rltr_verl.config import from_omegaconf
from rltr_verl.errors import DiskError, WorldError
from rltr_verl.preflight import require_room
from rltr_verl.quickstart.commands import rl_overrides
from rltr_verl.quickstart.options import Options, Paths
from rltr_verl.quickstart.report import table
from rltr_verl.quickstart.stages import STAGES, Run
from rltr_verl.quickstart.state import RunState, exclusive
from rltr_verl.scoring import Scorer
from rltr_verl.tooling import load_tools
from rltr_verl.world import load_world

NEEDED_BYTES = 1 << 30
"""Free disk without which a run is not started; a run leaves about a tenth of it."""


def run_quickstart(options: Options, *, fresh: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Run what is left to do in ``options.out`` and return the summary.

    Args:
        options: what to run; a folder is continued under equal options only.
        fresh: first remove what an earlier run left there.
        console: where to report.

    Raises:
        ConfigError: settings that cannot be, differ from those of the run in the folder, or another process is in it.
        DiskError: the folder cannot be written or the disk is full.
        WorldError: the folder holds a world of another version.
        StageError, GateError: a stage failed; what is done stays done.
        KeyboardInterrupt: passed on (SIGTERM too) after all processes of the stage have ended.
    """
    console = console or Console()
    _quiet_libraries()
    paths = Paths(options.out)
    with _folder(paths), exclusive(paths.lock), _sigterm_as_interrupt():
        if fresh:
            _remove(paths)
        run = _open(options, paths, console)
        finished = run.state.is_done(STAGES[-1].name)
        for number, stage in enumerate(STAGES, 1):
            run.stage(stage, number, len(STAGES))
        if finished:
            console.print(table(run.state.result(STAGES[-1].name)))
        console.print(f"[dim]Open {escape(str(paths.report))} in a browser. Begin again with --fresh.[/dim]")
        return run.state.result(STAGES[-1].name)


def _quiet_libraries() -> None:
    """Keep bars and notes of libraries off the terminal; what verl's own processes say is in the logs."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"verl\.")


@contextmanager
def _folder(paths: Paths) -> Iterator[None]:
    """The run's folder; one that is made here and stays empty, since nothing could be started, is removed again."""
    new = not paths.root.exists()
    _prepare_folder(paths)
    try:
        yield
    except BaseException:
        if new and set(paths.root.iterdir()) <= {paths.lock}:
            paths.lock.unlink(missing_ok=True)
            paths.root.rmdir()
        raise


def _prepare_folder(paths: Paths) -> None:
    where = "--out"
    require_room(paths.root, where, NEEDED_BYTES)
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        (paths.root / ".writable").touch()
        (paths.root / ".writable").unlink()
    except OSError as error:
        fix = "give --out a folder that you own."
        raise DiskError(f"'{paths.root}' cannot be written ({error.strerror})", where=where, fix=fix) from None


def _open(options: Options, paths: Paths, console: Console) -> Run:
    """Everything that can be wrong is found here, before any work."""
    state = RunState(paths.state, options.fingerprint())
    _check_world(options, paths)
    config = compose_recipe("rltr_planner", rl_overrides(options, paths, paths.world / "model"))
    settings = from_omegaconf(config)
    Scorer(settings)
    load_tools(settings.tools, settings.tool_settings)
    return Run(options, paths, state, console, config, settings)


def _check_world(options: Options, paths: Paths) -> None:
    """A world that is already there must be the one this run would build."""
    if not (paths.world / "manifest.json").exists():
        return
    fix = "start over with --fresh, or choose another --out."
    try:
        world = load_world(paths.world)
    except WorldError as error:
        raise WorldError(error.problem, where=error.where, fix=fix) from None
    if (world.seed, world.sizes) != (options.seed, options.sizes):
        problem = f"another world is here (seed {world.seed}, {world.sizes})"
        raise WorldError(problem, where=str(paths.world), fix=fix)


def _remove(paths: Paths) -> None:
    for path in paths.made_by_us():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """End as cleanly on SIGTERM as on Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def resume_command(options: Options) -> str:
    """What to type to go on with an interrupted run."""
    words = ["rltr quickstart", f"--algo {options.algo}", f"--seed {options.seed}"]
    words += [f"--out {shlex.quote(str(options.out))}"] if options.out != Options.out else []
    words += [f"--steps {options.rl_steps}"] if options.rl_steps != Options.rl_steps else []
    words += [f"--sft-steps {options.sft_steps}"] if options.sft_steps != Options.sft_steps else []
    return " ".join([*words, *map(shlex.quote, options.overrides)])
