"""The cold start's folder, and files that lose at most what was in flight.

Every finished line is appended at once. A process that is killed in the middle of a line leaves a torn one behind,
which the next writer cuts off; readers skip it.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltr_verl.errors import DataError, DiskError

_BLOCK = 65_536


@dataclass(frozen=True)
class Folder:
    """Paths of one cold start.

    ``run``: how it was sampled. ``samples``: one :class:`rltr_verl.coldstart.records.Sample` a line. ``verdicts``: one
    judged sample a line. ``ledger``: every candidate, its scores and why it was kept or dropped. ``selected``: the
    samples kept. ``answers``: one written answer a line. ``skipped``: rows of the queries that cannot be used.
    """

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run.json"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def skipped(self) -> Path:
        return self.root / "skipped_rows.jsonl"

    @property
    def verdicts(self) -> Path:
        return self.root / "verdicts.jsonl"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def selected(self) -> Path:
        return self.root / "selected.jsonl"

    @property
    def funnel(self) -> Path:
        return self.root / "funnel.json"

    @property
    def funnel_plot(self) -> Path:
        return self.root / "funnel.png"

    @property
    def answers(self) -> Path:
        return self.root / "answers.jsonl"


class Appender:
    """Appends whole lines to a JSON lines file; one writer at a time.

    Raises:
        DiskError: the file cannot be written, or another process is writing to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - open as long as the run lasts
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(_whole(self._file))
        except BlockingIOError:
            fix = "wait until it has ended, or choose another folder."
            raise DiskError("another process is writing this file", where=str(path), fix=fix) from None
        except OSError as error:
            raise _unwritable(path, error) from None

    def add(self, record: Mapping[str, Any]) -> None:
        """Append one line; it stands in the file when this returns.

        Raises:
            DiskError: the disk is full, for example; what was written before stays.
        """
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        if written != len(line):
            raise DiskError("the disk is full", where=str(self.path), fix="free some space, then run it again.")

    def close(self) -> None:
        """Close the file, which lets another process write to it."""
        self._file.close()

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, one by one; none if there is no file. A torn last line is skipped.

    Raises:
        DataError: names the line that is no JSON object.
    """
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n") and line.strip():
                yield _object(line, f"{path}, line {number}")


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write a JSON lines file that appears complete or not at all; returns the number of lines.

    Raises:
        DiskError: the file cannot be written.
    """
    count = 0
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
            fresh = Path(scratch) / path.name
            with fresh.open("wb") as file:
                for record in records:
                    file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
                    count += 1
            os.replace(fresh, path)
    except OSError as error:
        raise _unwritable(path, error) from None
    return count


def _object(line: bytes, where: str) -> dict[str, Any]:
    fix = "delete the line; what it held is made again."
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"not valid JSON ({error})", where=where, fix=fix) from None
    if not isinstance(found, dict):
        raise DataError("not a JSON object", where=where, fix=fix)
    return found


def _whole(file: Any) -> int:
    """Bytes up to the end of the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BLOCK)
        at = os.pread(file.fileno(), end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _unwritable(path: Path, error: OSError) -> DiskError:
    fix = "choose another folder or free some space."
    return DiskError(f"cannot be written ({error.strerror or error})", where=str(path), fix=fix)
