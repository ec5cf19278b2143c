"""Answers for the selected samples: played end to end, given with the row, or written by the teacher afterwards
(:mod:`rltr_verl.coldstart.answer_writer`)."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rltr_verl.coldstart.conversations import known_answer
from rltr_verl.coldstart.records import Sample
from rltr_verl.config import TeacherSettings
from rltr_verl.errors import ConfigError
from rltr_verl.parsing import parse_turn

AnswerSource = Literal["none", "reference", "teacher"]
SOURCES: tuple[AnswerSource, ...] = ("none", "reference", "teacher")

FAILED = "failed"
"""The reason that says nothing about the answer: the surroundings failed, and a later run asks again."""

_WHERE = "--answers"
_DECLINED = re.compile(
    r"\s*(?:\[no answer\]|(?:i['’]m sorry|i am sorry|sorry)\b|i (?:cannot|can['’]t|am unable to|am not able to) "
    r"(?:answer|provide|determine|help)|(?:there is |the results? (?:do not|don['’]t) (?:contain|hold) )?"
    r"(?:not enough|insufficient) information|(?:抱歉|对不起|很遗憾)|(?:我)?(?:无法|不能)(?:回答|确定|提供)|信息不足)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Answer:
    """The answer of a sample, or why there is none."""

    text: str | None
    reason: str | None = None


@dataclass
class Answers:
    """What is known of the answers.

    Attributes:
        source: where answers come from that no sample holds itself.
        written: the teacher's, by the sample's id.
        counts: by origin (``played``, ``reference``, ``teacher``) and, for those left out, by reason.
    """

    source: AnswerSource
    written: dict[str, Answer] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def of(self, sample: Sample) -> str | None:
        """The answer of a sample, or None; counts it."""
        origin, answer = self._find(sample)
        self.counts[origin if answer.text is not None else answer.reason or "missing"] += 1
        return answer.text

    def _find(self, sample: Sample) -> tuple[str, Answer]:
        played = known_answer(sample)
        if played is not None:
            return "played", checked(played)
        if self.source == "reference":
            given = reference(sample.task.info)
            return "reference", checked(given) if given is not None else Answer(None, "no reference")
        return "teacher", self.written.get(sample.id, Answer(None, "missing"))


def checked(text: str) -> Answer:
    """An answer as it may be trained: not empty, not a refusal, and nothing in it that ends or opens a turn's parts."""
    text = text.strip()
    if not text:
        return Answer(None, "empty")
    if _DECLINED.match(text):
        return Answer(None, "declined")
    read = parse_turn(f"<answer>{text}</answer>")
    if read.answer != text or read.faults or read.calls:
        return Answer(None, "markup")
    return Answer(text)


def reference(info: Mapping[str, Any]) -> str | None:
    """The row's reference as one text; of several the first. None where there is none."""
    given = info.get("reference")
    if isinstance(given, str) and given.startswith("["):
        try:
            given = json.loads(given)
        except ValueError:
            return given
    if isinstance(given, list):
        given = given[0] if given else None
    return None if given is None else str(given)


def require_source(source: AnswerSource, settings: TeacherSettings) -> None:
    """Refuse to ask a teacher that nobody named.

    Raises:
        ConfigError: says what to set.
    """
    if source == "teacher" and not settings.base_urls:
        fix = "add --set teacher.base_url=http://host:8000/v1 --set teacher.model=NAME, or --answers none|reference."
        raise ConfigError("no teacher is named that could write answers", where=_WHERE, fix=fix)
