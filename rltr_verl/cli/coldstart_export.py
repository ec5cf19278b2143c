"""``rltr coldstart export``: the selected trajectories as parquet for verl's SFT trainer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rltr_verl.cli._errors import reports_errors
from rltr_verl.coldstart.loss import DEFAULT_LOSS, read_loss

if TYPE_CHECKING:
    from rich.console import Console

    from rltr_verl.coldstart.answers import AnswerSource
    from rltr_verl.coldstart.export_report import ExportOptions, Report

_NOTHING_WRITTEN, _INTERRUPTED = 1, 130


class Loss(str, Enum):
    """The loss policies."""

    action_only = "action_only"
    action_final_think = "action+final_think"
    all_assistant = "all_assistant"


_DEFAULT_LOSS = Loss(DEFAULT_LOSS)


class AnswersFrom(str, Enum):
    """Where answers come from that no trajectory holds itself."""

    none = "none"
    reference = "reference"
    teacher = "teacher"


@reports_errors
def export(
    folder: Annotated[Path, typer.Option("--dir", help="Folder of the cold start, with selected.jsonl.")],
    model: Annotated[str, typer.Option(help="Folder or hub name of the model that is to learn (its tokenizer).")],
    out: Annotated[Path | None, typer.Option(help="Folder of the parquet files; by default that of --dir.")] = None,
    loss: Annotated[Loss, typer.Option(help="What is trained of an assistant turn.")] = _DEFAULT_LOSS,
    max_length: Annotated[
        int, typer.Option(min=0, help="Refuse longer rows, in tokens (data.max_length); 0: none is.")
    ] = 0,
    answers: Annotated[
        AnswersFrom | None,
        typer.Option(help="Who writes answers; none: only planner.parquet. By default the teacher if one is set."),
    ] = None,
    val_share: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the queries for *_val.parquet.")] = 0.0,
    summarizer_prompt: Annotated[Path | None, typer.Option(help="A summarizer prompt of your own.")] = None,
    max_record_chars: Annotated[
        int, typer.Option(min=1000, help="The summarizer's record is kept near this many characters.")
    ] = 32_000,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with the run's custom_chat_template, if it has one.")
    ] = None,
    kwargs: Annotated[
        str, typer.Option("--template-kwargs", help="The run's data.apply_chat_template_kwargs, as JSON.")
    ] = "{}",
    stock_rows: Annotated[
        int, typer.Option(min=0, help="Rows of each set that are held against verl's own dataset.")
    ] = 64,
    preview: Annotated[int, typer.Option(min=0, help="Print the first rows of the planner's set, coloured.")] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the node rltr, e.g. tools=\\[search,code]"),
    ] = None,
) -> None:
    """Write planner.parquet and, with answers, end_to_end.parquet and summarizer.parquet.

    Every row is proven token by token against its trajectory; rows that are too long, would lose their end or would
    train anything but the policy's own text are refused, and counted in export.json. Answers are appended to
    answers.jsonl as they come: the same command goes on where a run has ended. Ends with 0 if the planner's set has
    rows, 1 if not, 2 if something has to be mended first, 130 after Ctrl-C.
    """
    from rich.console import Console

    from rltr_verl.cli._settings import read_settings
    from rltr_verl.cli._template import read_template_arguments, read_tokenizer
    from rltr_verl.coldstart.export_report import ExportOptions
    from rltr_verl.data.prompt_files import load_summarizer_prompt_file

    settings = read_settings(changes or [])
    tokenizer = read_tokenizer(model, chat_template)
    default: AnswerSource = "teacher" if settings.teacher.base_urls else "none"
    options = ExportOptions(
        out=out,
        loss=read_loss(loss.value),
        max_length=max_length,
        answers=answers.value if answers else default,
        val_share=val_share,
        prompt=load_summarizer_prompt_file(summarizer_prompt) if summarizer_prompt else None,
        max_record_chars=max_record_chars,
        template_kwargs=read_template_arguments(kwargs),
        stock_rows=stock_rows,
    )
    report = _run(folder, settings, tokenizer, options)
    _print(report, Console())
    _preview(report, tokenizer, options, preview)
    raise typer.Exit(0 if report.sets["planner"].rows else _NOTHING_WRITTEN)


def _run(folder: Path, settings: Any, tokenizer: Any, options: ExportOptions) -> Report:
    from rich.console import Console

    from rltr_verl.coldstart.export import export as run

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with _progress(Console(stderr=True), folder, options) as watched:
            return run(folder, settings, tokenizer, watched)
    except KeyboardInterrupt:
        said = "Interrupted. Answers that have come are kept; the same command goes on."
        typer.secho(said, fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(_INTERRUPTED) from None


@contextmanager
def _progress(console: Console, folder: Path, options: ExportOptions) -> Iterator[ExportOptions]:
    """The options with a bar for the answers, where they are asked for, and one for the rows."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    total = _lines(folder / "selected.jsonl")
    columns = "{task.description}", BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        asked = progress.add_task("answers", total=total, visible=options.answers == "teacher")
        rows = progress.add_task("rows", total=total)
        yield replace(options, on_answer=lambda _: progress.advance(asked), on_row=lambda: progress.advance(rows))


def _lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _print(report: Report, console: Console) -> None:
    from rich.table import Table

    from rltr_verl.rollout.sft_turns import FIXES

    names = list(report.sets)
    table = Table(box=None, pad_edge=False)
    table.add_column(f"{report.selected:,} selected")
    for name in names:
        table.add_column(name, justify="right")
    found = [report.sets[name] for name in names]
    for what, attribute in (("rows", "rows"), ("rows to validate", "val_rows"), ("tokens", "tokens"),
                            ("trained tokens", "trained"), ("longest row", "longest")):  # fmt: skip
        table.add_row(what, *(f"{getattr(item, attribute):,}" for item in found))
    kinds = [kind for kind in FIXES if any(item.refused[kind] for item in found)]
    for kind in kinds:
        table.add_row(f"refused: {kind}", *(f"{item.refused[kind]:,}" for item in found))
    for how in ("same", "differs", "refused"):
        table.add_row(f"verl's own dataset: {how}", *(str(item.stock[how]) if item.stock else "-" for item in found))
    console.print(table)
    for line in _notes(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _notes(report: Report) -> Iterator[str]:
    yield f"loss: {report.loss}"
    if report.answers:
        yield "answers: " + ", ".join(f"{count:,} {name}" for name, count in report.answers.most_common())
    for name, found in report.sets.items():
        for kind, text in found.first.items():
            yield f"first refused ({name}, {kind}): {_one_line(text)}"
        if found.stock and found.stock["why"]:
            yield f"verl's own dataset reads {name} otherwise ({_one_line(found.stock['why'])})"
    if not report.prompts_compared:
        yield "prompts are not compared with the planner's: name its tools with --set tools=[...]."
    for file in report.files:
        yield f"written: {file}"


def _one_line(text: str) -> str:
    from rltr_verl.coldstart.preview import printable

    return printable(" ".join(text.split()))


def _preview(report: Report, tokenizer: Any, options: ExportOptions, count: int) -> None:
    """The first rows as the trainer gets them."""
    from rich.console import Console

    from rltr_verl.coldstart.preview import coloured
    from rltr_verl.rollout.sft_prompts import open_dataset

    file = next((file for file in report.files if Path(file).name == "planner.parquet"), None)
    if not count or file is None:
        return
    console = Console()
    data = {"apply_chat_template_kwargs": dict(options.template_kwargs), "max_length": 2**20}
    dataset = open_dataset(file, tokenizer, data, count)
    for index in range(len(dataset)):
        row = dataset.row(index)
        title = f"row {index}: {sum(row.mask)} of {len(row.input_ids)} tokens are trained"
        console.rule(title, style="cyan", align="left")
        console.print(coloured(row.input_ids, row.loss_mask, dataset.builder(index).template.decode), soft_wrap=True)
