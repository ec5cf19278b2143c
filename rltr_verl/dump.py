"""Per-trajectory records of a run: one JSON line each, appended as they are scored."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rltr_verl.errors import DiskError

_LOG = logging.getLogger(__name__)


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as JSON's own; anything else as text."""
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else str(value)


class TrajectoryDump:
    """Appends whole lines to a file of this process in ``folder``, so that processes never share a file.

    A write that fails (disk full) is warned about once; the run goes on, and later lines are tried again.

    Raises:
        DiskError: the folder cannot be made or written to.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder).expanduser() / f"trajectories-{socket.gethostname()}-{os.getpid()}.jsonl"
        self._torn = self._warned = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - open as long as the process scores
        except OSError as error:
            fix = "choose a folder that can be written to, or null."
            raise DiskError(f"cannot write to '{folder}' ({error.strerror})", where="rltr.dump_dir", fix=fix) from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; unbuffered, so that it stands in the file when this returns."""
        line = json.dumps(record, ensure_ascii=False, default=_plain).encode("utf-8", "replace") + b"\n"
        try:
            payload = b"\n" + line if self._torn else line
            self._torn = (self._file.write(payload) or 0) < len(payload)
        except OSError as error:
            self._torn = True
            self._warn(error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _LOG.warning("trajectories are not dumped to %s: %s. Training goes on.", self.path, error.strerror)
            self._warned = True
