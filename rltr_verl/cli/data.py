"""``rltr data``: training data in verl's format from a file of queries."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rltr_verl.cli._errors import reports_errors
from rltr_verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rltr_verl.data import DataOptions, Summary
    from rltr_verl.rollout.turns import Planner

_NO_PROMPT = "none"


class PromptLanguage(str, Enum):
    """Languages of the shipped prompts; ``auto`` goes by each query."""

    auto = "auto"
    en = "en"
    zh = "zh"


@reports_errors
def data(
    queries: Annotated[Path, typer.Argument(help="Queries: .jsonl, .csv or .parquet; with --inspect any parquet.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for train.parquet and val.parquet, or one .parquet file; without it, only check."),
    ] = None,
    val_share: Annotated[
        float | None, typer.Option(help="Share of the queries that validate (0.05; in one file 0).")
    ] = None,
    val: Annotated[Path | None, typer.Option(help="Validation queries of their own.")] = None,
    language: Annotated[PromptLanguage, typer.Option(help="Language of the prompt.")] = PromptLanguage.auto,
    prompt: Annotated[
        str | None, typer.Option(metavar="FILE|none", help="A prompt of your own; none: the query alone.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which queries validate.")] = 1,
    name: Annotated[str | None, typer.Option(help="Column data_source; by default the file's name.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="FIELD", help="Leave a field of the file out.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of the model: count the prompts' tokens, check the tools.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the node rltr, e.g. tools=\\[search,code]"),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Refuse longer prompts (data.max_prompt_length); needs --model.")
    ] = None,
    preview: Annotated[int, typer.Option(min=0, help="Print the prompts of the first rows; needs --model.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
    inspect: Annotated[bool, typer.Option("--inspect", help="Print a parquet file's columns and first row.")] = False,
) -> None:
    """Check queries and write them as verl's parquet; print what they came to.

    One query a line: {"query": "...", "id", "needs", "reference", "difficulty", "tools"}, all but the first optional.
    All rows are checked before anything is written; repeated queries are dropped.
    """
    if inspect:
        return _inspect(queries)
    from rltr_verl.data import DataOptions, load_planner_prompt_file

    own = prompt not in (None, _NO_PROMPT)
    options = DataOptions(
        val=val,
        val_share=val_share,
        language=None if language is PromptLanguage.auto else language.value,
        prompt=load_planner_prompt_file(str(prompt)) if own else None,
        no_prompt=prompt == _NO_PROMPT,
        seed=seed,
        name=name,
        ignore=frozenset(ignore or []),
        planner=_planner(model, changes or [], preview),
        max_prompt_tokens=max_prompt_tokens,
        overwrite=overwrite,
        keep_first=preview,
    )
    summary = _build(queries, out, options)
    _preview(summary, options)
    _print(summary, out)


def _planner(model: str | None, changes: list[str], preview: int) -> Planner | None:
    if model is None:
        if changes or preview:
            where = "--set" if changes else "--preview"
            raise ConfigError("there is no model to read the prompts with", where=where, fix="add --model FOLDER.")
        return None
    from rltr_verl.cli._settings import read_settings
    from rltr_verl.preflight import load_tokenizer
    from rltr_verl.rollout.turns import Planner

    settings = read_settings(changes)
    return Planner.build(settings, load_tokenizer(model, "--model"))


def _build(queries: Path, out: Path | None, options: DataOptions) -> Summary:
    from dataclasses import replace

    from rich.console import Console
    from rich.progress import Progress

    from rltr_verl.data import build_data
    from rltr_verl.data.reading import size_of

    console = Console(stderr=True)
    files = [queries] if options.val is None else [options.val, queries]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("rows", total=sum(map(size_of, files)) or None)
        return build_data(queries, out, replace(options, advance=lambda count: progress.advance(task, count)))


def _preview(summary: Summary, options: DataOptions) -> None:
    """The prompts as the rollout will send them, control tokens included."""
    if not summary.first or options.planner is None:
        return
    template = options.planner.template
    for row in summary.first:
        info = row["extra_info"]
        ids = template.prompt_ids(row["prompt"], list(options.planner.shown(info).values()))
        typer.secho(f"--- row {info['index']}, {len(ids)} tokens", fg=typer.colors.CYAN)
        typer.echo(template.decode(ids))


def _print(summary: Summary, out: Path | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("rows", overflow="fold")
    for split in ("train", "val"):
        table.add_column(split, justify="right", no_wrap=True)
    for what, train, val in summary.lines():
        table.add_row(escape(what), str(train), str(val))
    for what, cells in _lengths(summary):
        table.add_row(what, *cells)
    Console().print(table)
    dropped = ", ".join(f"{rows} {reason}" for reason, rows in sorted(summary.dropped.items())) or "none"
    typer.echo(f"{summary.rows} rows read, dropped: {dropped}.")
    for path in summary.files.values():
        typer.echo(f"written: {path}")
    if out is None:
        typer.echo("Nothing is written: no --out.")


def _lengths(summary: Summary) -> list[tuple[str, list[str]]]:
    tokens = summary.prompt_tokens
    if not any(tokens.values()):
        return []
    figures: dict[str, Callable[[list[int]], int]] = {"min": min, "median": statistics.median_low, "max": max}
    return [
        (f"prompt tokens, {name}", [str(figure(tokens[split])) if tokens[split] else "-" for split in tokens])
        for name, figure in figures.items()
    ]


def _inspect(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rltr_verl.rows import read_rows

    try:
        with pq.ParquetFile(path) as file:
            rows, schema = file.metadata.num_rows, file.schema_arrow
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot be read ({error})", where=str(path), fix="give a parquet file.") from None
    typer.echo(f"{path}: {rows} rows")
    for column in schema:
        typer.echo(f"  {column.name}: {column.type}")
    first: Any = next(read_rows(path), None)
    if first is not None:
        typer.echo(json.dumps(first, ensure_ascii=False, indent=2, default=str))
