"""What the tests of sampling share: a tool file, a model folder, files of queries, a teacher that types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rltr_verl.coldstart.records import Task, Usage
from rltr_verl.coldstart.samples import read_samples
from rltr_verl.coldstart.store import Folder
from rltr_verl.coldstart.teacher import Played, Teacher
from rltr_verl.config import RltrSettings, load_settings
from rltr_verl.parsing import parse_turn
from rltr_verl.trajectory import Trajectory
from tests.fakes.families import tokenizer_of

TOOL = '''
from rltr_verl import tool

@tool
def search(query: str) -> str:
    """Search.

    Args:
        query: words.
    """
    return f"found {query}"
'''
STOP = "<answer>"


def call(query: str) -> str:
    """A turn that searches."""
    return f"<tool_call>\n{json.dumps({'name': 'search', 'arguments': {'query': query}})}\n</tool_call>"


class Kit:
    """A folder with a model's tokenizer (``model``) and a tool (``tool``)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.tool = folder / "model", folder / "search.py"
        tokenizer_of("qwen3").save_pretrained(self.model)
        self.tool.write_text(TOOL, encoding="utf-8")

    def settings(self, url: str = "http://127.0.0.1:9/v1", **changes: Any) -> RltrSettings:
        """With the tool, and the teacher behind ``url``; ``changes`` are fields of ``rltr.teacher`` or ``rollout``."""
        rollout = changes.pop("rollout", {})
        teacher = {"base_url": url, "model": "m", "concurrency": 4, **changes}
        return load_settings({"tools": [str(self.tool)], "teacher": teacher, "rollout": rollout})


def write_queries(path: Path, *rows: Any) -> Path:
    """Lines of JSON; bytes are written as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def towns(count: int) -> list[dict[str, str]]:
    """Queries, ``t0`` and on."""
    return [{"query": f"How warm is town {number}?", "id": f"t{number}"} for number in range(count)]


class Typist(Teacher):
    """Writes what ``write(task)`` gives as its only turn: a text, or an exception to raise."""

    name = "typist"

    def __init__(self, write: Callable[[Task], str | Exception], delay_s: float = 0.0) -> None:
        self._write, self._delay_s = write, delay_s
        self.tasks: list[str] = []
        self.active = self.peak = 0
        self.closed = False

    async def play(self, task: Task) -> Played:
        self.tasks.append(task.id)
        self.active += 1
        self.peak = max(self.peak, self.active)
        try:
            await asyncio.sleep(self._delay_s)
        finally:
            self.active -= 1
        written = self._write(task)
        if isinstance(written, Exception):
            raise written
        turn = parse_turn(written)
        end = "answer" if turn.stopped else "no_call"
        return Played(Trajectory(task.info["query"], (turn,), (), end), Usage(10, 5, 0.5, 1.0))

    async def close(self) -> None:
        self.closed = True


def unlike(task: Task) -> str:
    """A text that no other sample has."""
    return f"{call(task.id)}"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """``samples.jsonl`` as it stands."""
    return [json.loads(line) for line in Folder(folder).samples.read_text("utf-8").splitlines()]


def ids_of(folder: Path) -> list[str]:
    """Ids of the samples, as readers get them."""
    return [sample.id for sample in read_samples(Folder(folder))]
