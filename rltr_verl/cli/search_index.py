"""``rltr search-index``: an index on disk for the tool ``search``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from rltr_verl.cli._errors import reports_errors

_ROOM = {".parquet": 10}
"""Bytes of an index to bytes of its documents, with some to spare: 3, and more where these are compressed."""


@reports_errors
def search_index(
    documents: Annotated[Path, typer.Argument(help='JSONL or .parquet with "text" and optionally "title" and "url".')],
    out: Annotated[Path, typer.Option(help="Folder to make.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an index that is there.")] = False,
) -> None:
    """Index documents for the tool `search` (rltr.tool_settings.search.index=FOLDER).

    The folder appears when it is complete; a run that is interrupted leaves nothing at its place.
    """
    from rltr_verl.preflight import require_room
    from rltr_verl.toolkit.document_index import build_index
    from rltr_verl.toolkit.documents import count_rows

    total = count_rows(documents)
    require_room(out, "--out", _ROOM.get(documents.suffix, 3) * documents.stat().st_size)
    with _bar(total) as on_read:
        count = build_index(documents, out, overwrite=overwrite, on_read=on_read)
    size = sum(file.stat().st_size for file in out.iterdir())
    typer.echo(f"{out}: {count} documents, {size / 2**20:.1f} MiB")


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], Any]]:
    """A bar over documents read, then one that runs while scores are computed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=total)

        def on_read(done: int) -> None:
            name = "reading" if done < total else "scoring"
            progress.update(task, completed=done, description=name)

        yield on_read
