"""The teacher writes answers, for the selected samples only.

Every answer is appended to ``answers.jsonl`` at once, with a digest of what was asked; a rerun asks only for what is
missing, was asked otherwise, or has failed for a reason outside of the teacher.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rltr_verl.coldstart.answers import FAILED, Answer, checked
from rltr_verl.coldstart.conversations import known_answer, summarizer_messages
from rltr_verl.coldstart.interrupts import run_interruptibly
from rltr_verl.coldstart.records import Sample
from rltr_verl.coldstart.store import Appender, Folder, read_lines
from rltr_verl.config import TeacherSettings
from rltr_verl.data.prompt_files import language_of, load_summarizer_prompt
from rltr_verl.errors import ConfigError, StageError
from rltr_verl.judge.asking import Endpoint
from rltr_verl.judge.prompt_files import PromptPack
from rltr_verl.judge.replies import ChatFailed, ChatReply
from rltr_verl.parsing import parse_turn

_NODE = "rltr.teacher"
_WINDOW = 2
"""Tasks waiting for a slot beside each one that has one."""
_GIVE_UP = 32
"""Failures in a row after which the endpoint counts as down."""
_FATAL = (401, 403, 404)


@dataclass(frozen=True)
class AnswerWriter:
    """Asks the teacher for answers.

    Args:
        folder: of the cold start.
        settings: the teacher's; ``concurrency`` bounds the requests in flight.
        prompt: a summarizer prompt of the user's own; None takes the shipped one in the query's language.
        max_chars: see :func:`rltr_verl.coldstart.conversations.summarizer_messages`.
        on_done: called with the reason (None: an answer) behind each sample.
    """

    folder: Folder
    settings: TeacherSettings
    prompt: PromptPack | None = None
    max_chars: int = 32_000
    on_done: Callable[[str | None], None] | None = None

    def prompt_of(self, sample: Sample) -> PromptPack:
        """The summarizer's prompt for a sample."""
        assert sample.trajectory is not None
        return self.prompt or load_summarizer_prompt(language_of(sample.trajectory.query))

    def messages(self, sample: Sample) -> list[dict[str, str]]:
        """What the teacher is asked about a sample."""
        assert sample.trajectory is not None
        return summarizer_messages(sample.trajectory, self.prompt_of(sample), self.max_chars)

    def write(self, samples: Iterable[Sample]) -> dict[str, Answer]:
        """Ask for every answer that is not there yet; the answers of all samples by id.

        Raises:
            ConfigError: no endpoint is named, or it refuses the key or the model.
            BudgetSpent: the budget is spent; what has been written is kept.
            StageError: the endpoint is down.
            DiskError: ``answers.jsonl`` cannot be written.
        """
        return run_interruptibly(lambda: self._write(samples))

    async def _write(self, samples: Iterable[Sample]) -> dict[str, Answer]:
        stored = {line["key"]: _stored(line) for line in read_lines(self.folder.answers)}
        endpoint = Endpoint(self.settings, _NODE, account=self.folder.root / "answers_budget")
        found: dict[str, Answer] = {}
        try:
            with Appender(self.folder.answers) as lines:
                run = _Run(self, endpoint, lines, found, stored)
                await run.all(iter(samples))
        finally:
            await endpoint.close()
        return found

    def key(self, messages: list[dict[str, str]]) -> str:
        """A digest of what is asked and of whom."""
        settings = self.settings
        asked = [settings.model, settings.temperature, settings.max_tokens, settings.thinking, messages]
        return hashlib.sha256(json.dumps(asked, ensure_ascii=False).encode("utf-8", "replace")).hexdigest()[:32]


@dataclass
class _Run:
    """One run of the writer."""

    writer: AnswerWriter
    endpoint: Endpoint
    lines: Appender
    found: dict[str, Answer]
    stored: dict[str, Answer]
    failures_in_a_row: int = 0

    async def all(self, samples: Iterator[Sample]) -> None:
        """Keep a bounded number of tasks going; the first error ends the others."""
        room = _WINDOW * self.writer.settings.concurrency
        pending = {asyncio.ensure_future(self.one(sample)) for sample in islice(samples, room)}
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                failed = [error for task in done if (error := task.exception()) is not None]
                if failed:
                    raise failed[0]
                pending |= {asyncio.ensure_future(self.one(sample)) for sample in islice(samples, len(done))}
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def one(self, sample: Sample) -> None:
        """The answer of a sample: what it holds itself, what is stored, or what the teacher writes now."""
        if known_answer(sample) is not None:
            return self._done(None)
        messages = self.writer.messages(sample)
        key = self.writer.key(messages)
        answer = self.stored.get(key)
        if answer is None or answer.reason == FAILED:
            answer = await self._ask(sample, messages, key)
        self.found[sample.id] = answer
        self._done(answer.reason)

    async def _ask(self, sample: Sample, messages: list[dict[str, str]], key: str) -> Answer:
        deadline = asyncio.get_running_loop().time() + self.writer.settings.deadline_s
        record: dict[str, Any] = {"id": sample.id, "key": key, "prompt": self.writer.prompt_of(sample).version}
        try:
            reply, spent = await self.endpoint.ask({"messages": messages, "seed": sample.task.seed}, deadline)
            record["usage"] = [spent.prompt_tokens, spent.completion_tokens, spent.money]
            answer, detail = _read(reply), None
            self.failures_in_a_row = 0
        except ChatFailed as failure:
            answer, detail = Answer(None, _reason(failure)), str(failure)
            self._give_up(failure)
        self.lines.add({**record, "answer": answer.text, "reason": answer.reason, "detail": detail})
        return answer

    def _give_up(self, failure: ChatFailed) -> None:
        where = failure.url or _NODE
        if failure.status in _FATAL:
            fix = f"check {_NODE}.base_url, model and api_key_env; what has been written is kept."
            raise ConfigError(str(failure), where=where, fix=fix)
        self.failures_in_a_row = self.failures_in_a_row + 1 if _reason(failure) == FAILED else 0
        if self.failures_in_a_row >= _GIVE_UP:
            fix = "mend that and run it again: what has been written is kept."
            raise StageError(f"{_GIVE_UP} requests in a row have failed ({failure})", where=where, fix=fix)

    def _done(self, reason: str | None) -> None:
        if self.writer.on_done:
            self.writer.on_done(reason)


def _read(reply: ChatReply) -> Answer:
    """The visible text of a reply; thoughts are none of it."""
    turn = parse_turn(reply.content)
    return Answer(None, "markup") if turn.calls else checked(turn.answer or "")


def _reason(failure: ChatFailed) -> str:
    return {"cut_off": "cut_off", "context_overflow": "too_long"}.get(failure.kind, FAILED)


def _stored(line: Mapping[str, Any]) -> Answer:
    return Answer(line["answer"], line["reason"])
