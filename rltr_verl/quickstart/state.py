"""What is done: one small JSON file, replaced as a whole, so that a run can be interrupted at any moment."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rltr_verl.errors import ConfigError

VERSION = 1


class RunState:
    """The stages of a run with their results and times.

    Args:
        path: ``state.json`` of the run; made with the first change.
        settings: of this run, plain JSON values.

    Raises:
        ConfigError: the file was made under other settings, by another version, or is unreadable.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._data: dict[str, Any] = {"version": VERSION, "settings": dict(settings), "stages": {}}
        if path.exists():
            self._data = _read(path)
            _same_settings(path, self._data["settings"], settings)

    def is_done(self, stage: str) -> bool:
        """Whether a stage has finished."""
        return bool(self._stage(stage).get("done"))

    def result(self, stage: str) -> dict[str, Any]:
        """What a finished stage left for later ones."""
        return dict(self._stage(stage).get("result", {}))

    def note(self, stage: str, **values: Any) -> None:
        """Remember something in the middle of a stage."""
        self._change(stage, notes={**self.notes(stage), **values})

    def notes(self, stage: str) -> dict[str, Any]:
        """What :meth:`note` remembered."""
        return dict(self._stage(stage).get("notes", {}))

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time per stage, of all attempts."""
        return {name: float(stage.get("seconds", 0.0)) for name, stage in self._data["stages"].items()}

    @property
    def interruptions(self) -> int:
        """How often a stage was begun again."""
        return sum(max(0, stage.get("attempts", 0) - 1) for stage in self._data["stages"].values())

    def attempt(self, stage: str) -> int:
        """Number of the current attempt at a stage, from 1."""
        return int(self._stage(stage).get("attempts", 0))

    @contextmanager
    def running(self, stage: str) -> Iterator[None]:
        """Count an attempt and its wall time, however it ends."""
        self._change(stage, attempts=self.attempt(stage) + 1)
        before, start = self.seconds.get(stage, 0.0), time.monotonic()
        try:
            yield
        finally:
            self._change(stage, seconds=before + time.monotonic() - start)

    def finish(self, stage: str, result: Mapping[str, Any]) -> None:
        """Record a stage as done."""
        self._change(stage, done=True, result=dict(result))

    def _stage(self, name: str) -> dict[str, Any]:
        return self._data["stages"].get(name, {})

    def _change(self, stage: str, **values: Any) -> None:
        self._data["stages"][stage] = {**self._stage(stage), **values}
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self._data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(scratch, self._path)


@contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder.

    Raises:
        ConfigError: another process is in it.
    """
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "wait for it, or choose another --out."
            raise ConfigError("another quickstart runs in this folder", where=str(lock.parent), fix=fix) from None
        yield


def _read(path: Path) -> dict[str, Any]:
    fix = "start over with --fresh, or choose another --out."
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"cannot be read ({error})", where=str(path), fix=fix) from None
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ConfigError(f"was not written by version {VERSION} of the quickstart", where=str(path), fix=fix)
    return data


def _same_settings(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    now = json.loads(json.dumps(now))
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    changed = [f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in differing]
    if changed:
        problem = f"the run here has other settings ({'; '.join(changed)})"
        fix = "repeat the old settings to go on with it, start over with --fresh, or choose another --out."
        raise ConfigError(problem, where=str(path.parent), fix=fix)
