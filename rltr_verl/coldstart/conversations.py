"""A selected sample as conversations to learn from: for the planner, for an end-to-end agent, for a summarizer.

Contents are plain text, calls included, just as they were sampled: parquet then adds no keys, and every dataset reads
the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from rltr_verl.coldstart.records import Sample
from rltr_verl.data.prompt_files import LANGUAGES, load_end_to_end_prompt, load_planner_prompt
from rltr_verl.judge.prompt_files import PromptPack
from rltr_verl.judge.prompting import judge_messages
from rltr_verl.parsing import STOP_MARKER
from rltr_verl.rollout.sft_turns import Conversation, RowRefused, TurnStyle, WrittenTurn
from rltr_verl.trajectory import Trajectory

Message = dict[str, str]


@dataclass(frozen=True)
class Row:
    """What is stored, and what the rollout of it was: the stored messages must come to these texts."""

    messages: list[Message]
    recorded: Conversation


def planner_row(sample: Sample, style: TurnStyle) -> Row:
    """Ends with the turn that stops, behind the marker; an answer that was written behind it is left out."""
    turns = _recorded(_played(sample), style)
    return _row(_prompt(sample), (*turns[:-1], WrittenTurn(_up_to_marker(turns[-1].text))))


def end_to_end_row(sample: Sample, answer: str, style: TurnStyle) -> Row:
    """The same turns; the last one goes on with the answer and ends as turns do.

    The shipped planner prompt, which says that somebody else answers, gives way to the end-to-end one; a prompt of the
    user's own stays.
    """
    turns = _recorded(_played(sample), style)
    text = f"{_up_to_marker(turns[-1].text)}{answer}</answer>"
    prompt = [_end_to_end(message) for message in _prompt(sample)]
    return _row(prompt, (*turns[:-1], WrittenTurn(text, style.last_end)))


def summarizer_row(sample: Sample, answer: str, prompt: PromptPack, max_chars: int, style: TurnStyle) -> Row:
    """The summarizer's prompt, and the answer."""
    asked = summarizer_messages(_played(sample), prompt, max_chars)
    turn = WrittenTurn(answer, style.last_end)
    return Row([*asked, {"role": "assistant", "content": answer}], Conversation(tuple(asked), (turn,)))


def summarizer_messages(trajectory: Trajectory, prompt: PromptPack, max_chars: int) -> list[Message]:
    """The messages that ask for the answer: the query, and each call with its status and its result, as data.

    The record is the judge's (:mod:`rltr_verl.judge.prompting`): what the policy and the tools wrote is quoted line by
    line between two lines with a token. The token is a digest of the trajectory, which nothing in it can name; so the
    same trajectory gives the same messages.

    Args:
        max_chars: observations are cut to keep the record near this many characters.
    """
    text = json.dumps(trajectory.to_dict(), ensure_ascii=False, sort_keys=True, default=str)
    token = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:24]
    return judge_messages(trajectory, prompt, max_chars, token)


def known_answer(sample: Sample) -> str | None:
    """The answer that the teacher wrote itself, where it played end to end."""
    last = sample.trajectory.turns[-1] if sample.trajectory and sample.trajectory.turns else None
    return (last.answer or "").strip() or None if last is not None and last.stopped else None


def _played(sample: Sample) -> Trajectory:
    if sample.trajectory is None or not sample.trajectory.turns:
        raise RowRefused("roles", "the sample holds no turn")
    return sample.trajectory


def _recorded(trajectory: Trajectory, style: TurnStyle) -> tuple[WrittenTurn, ...]:
    if style.closes_thought and any(turn.thought.strip() for turn in trajectory.turns):
        raise RowRefused("thought", "the teacher thought, where the planner's prompt closes the thought")
    end = style.template.glue.turn_end
    return tuple(
        WrittenTurn(style.without_end(turn.text), end, tuple(item.text for item in turn.observations))
        for turn in trajectory.turns
    )


def _up_to_marker(text: str) -> str:
    head, marker, _ = text.partition(STOP_MARKER)
    if not marker:
        raise RowRefused("no_stop_marker", "the last turn holds no stop marker")
    return head + marker


def _prompt(sample: Sample) -> list[Message]:
    return [{"role": message["role"], "content": message["content"]} for message in sample.task.prompt]


def _end_to_end(message: Message) -> Message:
    shipped = {load_planner_prompt(language).system: language for language in LANGUAGES}
    language = shipped.get(message["content"]) if message["role"] == "system" else None
    return {**message, "content": load_end_to_end_prompt(language).system} if language else message


def _row(prompt: list[Message], turns: tuple[WrittenTurn, ...]) -> Row:
    messages = [dict(message) for message in prompt]
    for turn in turns:
        messages.append({"role": "assistant", "content": turn.text})
        messages += [{"role": "tool", "content": text} for text in turn.observations]
    return Row(messages, Conversation(tuple(prompt), turns))
