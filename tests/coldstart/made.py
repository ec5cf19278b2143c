"""Samples as the sampler writes them, made without a teacher."""

from __future__ import annotations

import json
from pathlib import Path

from rltr_verl.coldstart.records import Outcome, Sample, Task
from rltr_verl.trajectory import Trajectory

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
NEEDS = [{"tool": "search", "arguments": {"query": ["arlen"]}}]


def call(name: str = "search", **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(*texts: str, query: str = "How warm is Arlen?", observed: str = "41", status: str | None = None):
    """The trajectory of these turns, ended by the stop marker; every call is observed."""
    messages = []
    for text in (*texts, "<answer>"):
        messages.append({"role": "assistant", "content": text})
        result = {"role": "tool", "content": observed, **({"status": status} if status else {})}
        messages += [result] * text.count("<tool_call>")
    return Trajectory.from_messages(messages, query, tools=[SEARCH])


GOOD = played(call(query="arlen"))
POOR = played(call(query="weather"))


def sample(query_id: str = "q1", number: int = 0, trajectory: Trajectory | None = GOOD, **info) -> Sample:
    outcome, reason = info.pop("outcome", Outcome.OK), info.pop("why", None)
    given = {"query": "How warm is Arlen?", "needs": json.dumps(NEEDS), **info}
    task = Task(query_id, number, seed=7, prompt=({"role": "user", "content": given["query"]},), info=given)
    return Sample(task, outcome, trajectory, reason, teacher="teacher-model")


def write(folder: Path, *samples: Sample) -> Path:
    """``samples.jsonl`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(item.to_dict(), ensure_ascii=False) + "\n" for item in samples)
    (folder / "samples.jsonl").write_text("".join(lines), "utf-8")
    return folder


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def ledger(folder: Path) -> dict[str, dict]:
    """Lines of the ledger by id."""
    return {line["id"]: line for line in lines(folder / "ledger.jsonl")}


def reasons(folder: Path) -> dict[str, str]:
    return {name: line["reason"] for name, line in ledger(folder).items()}
