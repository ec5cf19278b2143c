"""Selected samples -> parquet for verl's SFT trainer, every row proven token by token before it is written.

From one selection three sets: ``planner`` (ends at the stop marker), ``end_to_end`` (the same turns, and the answer)
and ``summarizer`` (query and calls with their results, then the answer). Each row is made into ids by the trainer's own
code (:mod:`rltr_verl.rollout.sft_rows`) and held against the recorded texts; one that fails is refused and counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rltr_verl.coldstart.answer_writer import AnswerWriter
from rltr_verl.coldstart.answers import Answers, require_source
from rltr_verl.coldstart.conversations import Row, end_to_end_row, planner_row, summarizer_row
from rltr_verl.coldstart.export_report import SETS, ExportOptions, Report
from rltr_verl.coldstart.parquet import RowFile, tools_type
from rltr_verl.coldstart.records import Sample
from rltr_verl.coldstart.store import Folder, read_lines, write_lines
from rltr_verl.config import RltrSettings
from rltr_verl.errors import DataError
from rltr_verl.rollout.sft_rows import RowBuilder
from rltr_verl.rollout.sft_turns import RowRefused
from rltr_verl.rollout.template import ChatTemplate


def export(folder: Path, settings: RltrSettings, tokenizer: Any, options: ExportOptions) -> Report:
    """Write the sets of a cold start.

    Args:
        folder: of the cold start, with ``selected.jsonl``.
        settings: node ``rltr``. With ``tools``, prompts are held against those of the planner; ``teacher`` writes the
            answers if it is to.
        tokenizer: of the model that is to learn, with its chat template.

    Raises:
        DataError: nothing is selected, or a line is no sample.
        ConfigError: see :class:`AnswerWriter`; an unknown tool.
        ModelError: the chat template cannot be used.
        DiskError: a file cannot be written.
    """
    files = Folder(folder)
    if not files.selected.is_file():
        raise DataError("nothing is selected yet", where=str(files.selected), fix="run rltr coldstart select first.")
    require_source(options.answers, settings.teacher)
    answers = Answers(options.answers)
    if options.answers == "teacher":
        writer = _writer(files, settings, options)
        answers.written = writer.write(read_selected(files))
    run = _Export(files, settings, tokenizer, options, answers)
    return run.run()


def read_selected(files: Folder) -> Iterator[Sample]:
    """The selected samples.

    Raises:
        DataError: names the line that is none.
    """
    for number, line in enumerate(read_lines(files.selected), 1):
        try:
            yield Sample.from_dict(line)
        except (KeyError, TypeError, ValueError) as error:
            where, fix = f"{files.selected}, line {number}", "run rltr coldstart select again."
            raise DataError(f"is no sample ({type(error).__name__}: {error})", where=where, fix=fix) from None


def _writer(files: Folder, settings: RltrSettings, options: ExportOptions) -> AnswerWriter:
    return AnswerWriter(files, settings.teacher, options.prompt, options.max_record_chars, options.on_answer)


class _Export:
    """One export."""

    def __init__(
        self, files: Folder, settings: RltrSettings, tokenizer: Any, options: ExportOptions, answers: Answers
    ) -> None:
        from rltr_verl.rollout.turns import Planner

        self.files, self.options, self.answers = files, options, answers
        self.tokenizer = tokenizer
        self.planner = Planner.build(settings, tokenizer, options.template_kwargs) if settings.tools else None
        self.writer = _writer(files, settings, options)
        self.scores = {line["id"]: line.get("score") for line in read_lines(files.ledger) if line.get("kept", True)}
        self.report = Report(loss=options.loss, max_length=options.max_length, prompts_compared=bool(settings.tools))
        self.out = options.out or files.root
        self._builders: dict[str, RowBuilder] = {}

    def run(self) -> Report:
        """Make, prove and write all rows."""
        self.out.mkdir(parents=True, exist_ok=True)
        tools = {_tools_of(sample) for sample in read_selected(self.files)}
        kind = tools_type([json.loads(text) for text in sorted(tools)])
        self.report.tools_as_text = kind is None
        self.rows = {
            (name, split): RowFile(self.out / f"{name}{split}.parquet", kind, has_tools=name != "summarizer")
            for name in SETS
            for split in ("", "_val")
        }
        try:
            self._write()
        except BaseException:
            for file in self.rows.values():
                file.discard()
            raise
        self.report.answers = self.answers.counts
        self._compare_with_stock()
        write_lines(self.out / "export.json", [self.report.to_dict()])
        return self.report

    def _write(self) -> None:
        for sample in read_selected(self.files):
            self.report.selected += 1
            self._sample(sample)
            if self.options.on_row:
                self.options.on_row()
        self.report.files = [str(file.path) for file in self.rows.values() if file.finish()]

    def _sample(self, sample: Sample) -> None:
        """A sample's row in each set."""
        builder = self._builder(_tools_of(sample))
        self._add("planner", sample, builder, lambda: planner_row(sample, builder.style))
        if self.options.answers == "none":
            return
        answer = self.answers.of(sample)
        if answer is None:
            return
        self._add("end_to_end", sample, builder, lambda: end_to_end_row(sample, answer, builder.style))
        plain = self._builder("[]")
        prompt, room = self.writer.prompt_of(sample), self.options.max_record_chars
        self._add("summarizer", sample, plain, lambda: summarizer_row(sample, answer, prompt, room, plain.style))

    def _add(self, name: str, sample: Sample, builder: RowBuilder, make: Callable[[], Row]) -> None:
        report = self.report.sets[name]
        tools = [] if name == "summarizer" else list(sample.trajectory.tools) if sample.trajectory else []
        try:
            row = make()
            built = builder.build(row.messages, tools, self.options.max_length)
            builder.check(built, row.recorded, tools)
            if name != "summarizer":
                self._check_prompt(sample, row, built.prompt_ids)
        except RowRefused as refusal:
            report.refuse(sample.id, refusal)
            return
        split = "_val" if _draw(sample.task.query_id) < self.options.val_share else ""
        self.rows[name, split].add(self._record(sample, row, tools))
        length = len(built.prompt_ids) + len(built.ids)
        report.rows, report.val_rows = report.rows + (not split), report.val_rows + bool(split)
        report.tokens, report.trained = report.tokens + length, report.trained + sum(built.mask)
        report.longest = max(report.longest, length)
        report.difficulties[_difficulty(sample) or "not given"] += 1

    def _check_prompt(self, sample: Sample, row: Row, prompt_ids: list[int]) -> None:
        """The prompt is the one that the recipe's tools and template make of the row's messages."""
        if self.planner is None:
            return
        shown = list(self.planner.shown(sample.task.info).values())
        expected = self.planner.template.prompt_ids([dict(message) for message in row.recorded.prompt], shown)
        if prompt_ids != expected:
            from rltr_verl.rollout.sft_prompts import difference

            problem = difference(self.planner.template, "", prompt_ids, expected).problem
            raise RowRefused("prompt", problem)

    def _record(self, sample: Sample, row: Row, tools: list[dict[str, Any]]) -> dict[str, Any]:
        selection = sample.task.info.get("tool_selection")
        return {
            "messages": row.messages,
            "tools": tools,
            "id": sample.id,
            "query_id": sample.task.query_id,
            "score": self.scores.get(sample.id),
            "difficulty": _difficulty(sample),
            "loss": self.options.loss,
            "tool_selection": None if selection is None else [str(name) for name in selection],
        }

    def _builder(self, tools: str) -> RowBuilder:
        if tools not in self._builders:
            template = ChatTemplate(self.tokenizer, json.loads(tools), self.options.template_kwargs)
            self._builders[tools] = RowBuilder(self.tokenizer, template, self.options.loss)
        return self._builders[tools]

    def _compare_with_stock(self) -> None:
        from rltr_verl.rollout.sft_stock import compare_with_stock

        data = {"apply_chat_template_kwargs": dict(self.options.template_kwargs), "max_length": 2**20}
        for name in SETS:
            if self.options.stock_rows and self.report.sets[name].rows:
                path = self.out / f"{name}.parquet"
                found = compare_with_stock(path, self.tokenizer, data, self.options.stock_rows)
                self.report.sets[name].stock = found.to_dict()


def _tools_of(sample: Sample) -> str:
    """The schemas that a sample's prompt shows, as JSON text."""
    return json.dumps(list(sample.trajectory.tools) if sample.trajectory else [], ensure_ascii=False)


def _difficulty(sample: Sample) -> str | None:
    given = sample.task.info.get("difficulty")
    return None if given is None else str(given)


def _draw(query_id: str) -> float:
    """A number in [0, 1) that depends on the query alone, so that no query is in both splits."""
    return int.from_bytes(hashlib.blake2b(query_id.encode(), digest_size=6).digest(), "big") / 2**48
