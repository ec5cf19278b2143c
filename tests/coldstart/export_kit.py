"""Selected samples for the export's tests: turns played as the planner's loop plays them, for any family."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rltr_verl.coldstart.records import Outcome, Sample, Task
from rltr_verl.parsing import parse_turn
from rltr_verl.rollout.turns import Rollout
from rltr_verl.trajectory import Observation, Trajectory, Turn
from tests.fakes.families import FAMILIES, TOOLS, template_of, tokenizer_of

QUERY = "How warm is it in Arlen?"


def call(query: str = "Arlen temperature") -> str:
    body = json.dumps({"name": "search", "arguments": {"query": query}}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def played(family: str, turns: Sequence[tuple[str, Sequence[str]]], query: str = QUERY) -> tuple[Rollout, Trajectory]:
    """A rollout in which the policy samples each text and, behind a turn with results, the family's end of turn."""
    template = template_of(family)
    rollout = Rollout(template.prompt_ids([{"role": "user", "content": query}]), 100_000)
    for text, results in turns:
        end = template.glue.turn_end if results else ""
        sampled = rollout.add_sampled(_Output(template.encode(text + end)))
        turn = parse_turn(template.decode(sampled))
        if results:
            ids, seen = template.observe(list(results), turn_ended=template.ends_turn(sampled))
            rollout.add_context(ids)
            turn = Turn(**{**vars(turn), "observations": tuple(map(Observation, seen))})
        rollout.turns.append(turn)
    return rollout, rollout.trajectory(query, {"search": TOOLS[0]})


class _Output:
    log_probs = None
    stop_reason = None

    def __init__(self, ids: list[int]) -> None:
        self.token_ids = ids


def sample(trajectory: Trajectory, number: int = 0, query_id: str = "q1", **info: Any) -> Sample:
    prompt = ({"role": "user", "content": trajectory.query},)
    task = Task(query_id, number, 7, prompt, {"query": trajectory.query, **info})
    return Sample(task, Outcome.OK, trajectory, teacher="test")


def two_turns(family: str, thought: bool = True, answer: str = "") -> Trajectory:
    think = "<think>\n{}\n</think>\n\n" if thought else "{:.0}"
    last = think.format("It is known.") + "<answer>" + answer + ("</answer>" if answer else "")
    turns = [(think.format("Look it up.") + call(), ["41 degrees"]), (last, [])]
    return played(family, turns)[1]


def select(folder: Path, samples: Sequence[Sample]) -> Path:
    """Write ``selected.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(item.to_dict(), ensure_ascii=False) for item in samples]
    (folder / "selected.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return folder


def saved(family: str, folder: Path) -> Path:
    """The family's tokenizer as a model folder."""
    tokenizer_of(family).save_pretrained(folder)
    return folder


__all__ = [
    "FAMILIES",
    "QUERY",
    "call",
    "played",
    "sample",
    "saved",
    "select",
    "template_of",
    "tokenizer_of",
    "two_turns",
]
