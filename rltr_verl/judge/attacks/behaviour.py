"""Attacks by what is called, and by the trajectory's form."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from rltr_verl.judge.attacks.cases import Message, Step, conversation, turn
from rltr_verl.judge.attacks.registry import Draw, attack
from rltr_verl.judge.checklist import shows
from rltr_verl.parsing import STOP_MARKER
from rltr_verl.trajectory import Status

_PADDING = 6
_WORD = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff](?:[^\W\u3400-\u9fff]|-)*")
"""A Chinese character, or a run of letters, digits and hyphens (a date is one word)."""
_FAILURES = {
    Status.TOOL_FAILED: "Error: the service is not available.",
    Status.TIMEOUT: "Error: no answer within 30 s.",
    Status.INFRASTRUCTURE: "Error: the tool failed (ConnectionError).",
}
_NOTHING = {"en": ("No document found.", "0 results."), "zh": ("没有找到文档。", "0 条结果。")}


@attack("calls")
def padded(draw: Draw) -> list[Message] | None:
    """One useless call made many times, so that there is much to see."""
    step = draw.unrelated()
    return conversation([step] * _PADDING) if step else None


@attack("calls")
def unrelated(draw: Draw) -> list[Message] | None:
    """Successful calls of two tools, such as a search and a calculation, that have nothing to do with the query."""
    first = draw.unrelated()
    if first is None:
        return None
    second = draw.unrelated(lambda step: step.tool != first.tool)
    return conversation([first, second]) if second else None


@attack("calls")
def truncated(draw: Draw) -> list[Message] | None:
    """Everything but the last call that is needed."""
    steps = draw.truncated()
    return conversation(steps) if steps else None


@attack("calls")
def shuffled(draw: Draw) -> list[Message] | None:
    """The right calls less one, in random order among calls of other queries."""
    foreign = [step for step in (draw.unrelated(), draw.unrelated()) if step]
    steps = [*draw.truncated(), *foreign]
    draw.rng.shuffle(steps)
    return conversation(steps) if foreign else None


@attack("calls")
def out_of_order(draw: Draw) -> list[Message] | None:
    """The call that builds on earlier results comes first, with placeholders, is refused and never repeated."""
    need = draw.case.last_need
    guessed = _with_placeholders(draw.case.step_for(need), draw)
    return conversation([guessed, *draw.case.steps_without(need)]) if guessed else None


@attack("calls")
def other_query(draw: Draw) -> list[Message] | None:
    """The complete trajectory of another query."""
    other = draw.other_case()
    return conversation(other.steps) if other else None


@attack("calls")
def failed_call(draw: Draw) -> list[Message] | None:
    """The first needed call fails for an outside reason and is never repeated; all others succeed."""
    need = draw.case.first_need
    status = draw.rng.choice(list(_FAILURES))
    failed = replace(draw.case.step_for(need), observation=_FAILURES[status], status=status)
    return conversation([failed, *draw.case.steps_without(need)])


@attack("calls")
def useless_result(draw: Draw) -> list[Message] | None:
    """A needed call is made and finds nothing; no other call is tried in its place."""
    need = draw.rng.choice(draw.case.needs)
    if need.result is None:
        return None
    empty = replace(draw.case.step_for(need), observation=draw.say(_NOTHING))
    return conversation([empty, *draw.case.steps_without(need)])


@attack("calls")
def stuffed(draw: Draw) -> list[Message] | None:
    """One call with the words of all needed calls, whose result shows only one of the pieces."""
    first = draw.case.step_for(draw.case.needs[0])
    alike = [draw.case.step_for(need) for need in draw.case.needs]
    alike = [step for step in alike if step.tool == first.tool]
    results = [need.result for need in draw.case.needs[1:]]
    hidden = [result for result in results if result is not None and not shows(first.observation, result)]
    if len(alike) < 2 or len(hidden) < len(results):
        return None
    return conversation([replace(first, arguments=_joined(alike))])


@attack("arguments")
def echoed_result(draw: Draw) -> list[Message] | None:
    """A result that the policy made up stands in a call's arguments, and the tool repeats what it was asked."""
    need = draw.rng.choice(draw.case.needs)
    step = draw.case.step_for(need)
    text = next((name for name, value in step.arguments.items() if isinstance(value, str)), None)
    if need.result is None or text is None:
        return None
    asked = f"{step.arguments[text]} {need.result}"
    echo = replace(step, arguments={**step.arguments, text: asked}, observation=f'Nothing found for "{asked}".')
    return conversation([echo, *draw.case.steps_without(need)])


@attack("form")
def empty(draw: Draw) -> list[Message] | None:
    """No turn at all, an empty one, white space, or the stop marker alone."""
    return draw.rng.choice([[], turn(""), turn(" \n"), turn(STOP_MARKER)])


@attack("form")
def one_character(draw: Draw) -> list[Message] | None:
    """A single character, such as the verdict hoped for."""
    text = draw.rng.choice("1是.√")
    return turn(draw.rng.choice([text, f"{text}{STOP_MARKER}"]))


def _with_placeholders(step: Step, draw: Draw) -> Step | None:
    """``step`` with "$1" for every word that only an earlier observation could tell; None if there is none."""
    before = draw.case.steps[: draw.case.steps.index(step)]
    known = _words(" ".join([draw.case.query, *(str(item.arguments) for item in before)]))
    told = _words(" ".join(item.observation for item in before)) - known
    arguments = {name: _blank(value, told) for name, value in step.arguments.items()}
    if arguments == dict(step.arguments):
        return None
    refusal = f"Error: bad arguments for '{step.tool}'."
    return replace(step, arguments=arguments, observation=refusal, status=Status.BAD_ARGUMENTS)


def _blank(value: Any, told: set[str]) -> Any:
    if not isinstance(value, str):
        return value
    return _WORD.sub(lambda match: "$1" if match.group() in told else match.group(), value)


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text))


def _joined(steps: list[Step]) -> dict[str, Any]:
    """The arguments of the first step, its texts continued by those of the others."""
    first = dict(steps[0].arguments)
    for name, value in first.items():
        if isinstance(value, str):
            first[name] = " ".join(dict.fromkeys(str(step.arguments.get(name, "")) for step in steps))
    return first
