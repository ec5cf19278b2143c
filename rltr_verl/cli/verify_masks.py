"""``rltr verify-masks``: does the dump of a run show that exactly the sampled tokens were trained?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rltr_verl.cli._errors import reports_errors
from rltr_verl.cli._template import read_template_arguments, read_tokenizer
from rltr_verl.errors import DataError
from rltr_verl.masks import mask_of
from rltr_verl.rollout.mask_check import Divergence, MaskFault, check_masks, find_divergence
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.trajectory import Trajectory

_AROUND = 24
_IDS = ("prompt_ids", "response_ids", "trained")


@dataclass(frozen=True)
class Record:
    """One line of a dump that holds ids."""

    where: str
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    trajectory: Trajectory


@dataclass
class Verdict:
    """What a dump came to."""

    trajectories: int = 0
    turns: int = 0
    trained: int = 0
    context: int = 0
    faulty: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: tuple[Record, MaskFault] | None = None
    diverging: int = 0
    first_divergence: tuple[Record, Divergence] | None = None

    def add(self, record: Record, faults: list[MaskFault], divergence: Divergence | None) -> None:
        """Count one trajectory."""
        self.trajectories += 1
        self.turns += len(record.trajectory.turns)
        self.trained += sum(record.mask)
        self.context += len(record.mask) - sum(record.mask)
        self.kinds.update(fault.kind for fault in faults)
        self.faulty += bool(faults)
        if faults and self.first is None:
            self.first = (record, faults[0])
        self.diverging += divergence is not None
        if divergence and self.first_divergence is None:
            self.first_divergence = (record, divergence)


@reports_errors
def verify_masks(
    dump: Annotated[Path, typer.Argument(help="A folder that rltr.dump_dir names, or one of its files.")],
    model: Annotated[str, typer.Option("--model", help="Model folder of the run, for its tokenizer.")],
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="File with the run's custom_chat_template, if it had one.")
    ] = None,
    kwargs: Annotated[
        str, typer.Option("--template-kwargs", help="The run's data.apply_chat_template_kwargs, as JSON.")
    ] = "{}",
) -> None:
    """Check that exactly the sampled tokens of a dumped run are trained; exit status 1 if not."""
    tokenizer, arguments = read_tokenizer(model, chat_template), read_template_arguments(kwargs)
    template, verdict = None, Verdict()
    for record in read_dump(dump):
        template = template or ChatTemplate(tokenizer, record.trajectory.tools, arguments)
        ids = (record.response_ids, record.mask, record.trajectory, template)
        verdict.add(record, check_masks(record.prompt_ids, *ids), find_divergence(*ids))
    if template is None:
        fix = "give a dump of rltr.dump_dir; verl's trainer.rollout_data_dir holds neither ids nor masks."
        raise DataError("no line holds ids", where=str(dump), fix=fix)
    _print(verdict, template)
    raise typer.Exit(1 if verdict.faulty else 0)


def read_dump(path: Path) -> Iterator[Record]:
    """The lines of a dump that hold ids.

    Raises DataError for a missing file, and for a line that is no record of a dump.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise DataError("no dump here", where=str(path), fix="give the folder of rltr.dump_dir, or a file in it.")
    for file in files:
        with file.open("rb") as lines:  # a line that was torn may end inside of a character
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield from _record(line, f"{file}, line {number}")


def _record(line: bytes, where: str) -> Iterator[Record]:
    fix = "give a dump of rltr.dump_dir as it is; a line that a full disk tore may be deleted."
    try:
        data = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON ({error})", where=where, fix=fix) from None
    if not isinstance(data, Mapping) or not all(name in data for name in _IDS):
        return
    try:
        ids = list(data["response_ids"])
        if not all(isinstance(item, int) and 0 <= item < 2**31 for item in ids):
            raise ValueError("response_ids are no ids")
        mask = mask_of(data["trained"], len(ids))
        yield Record(where, data["prompt_ids"], ids, mask, Trajectory.from_dict(data["trajectory"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"not a record of a dump ({type(error).__name__}: {error})", where=where, fix=fix) from None


def _print(verdict: Verdict, template: ChatTemplate) -> None:
    console = Console(soft_wrap=True, highlight=False)
    table = Table(show_header=False, box=None)
    for name, value in _rows(verdict):
        table.add_row(name, value)
    console.print(table)
    if verdict.first_divergence:
        record, divergence = verdict.first_divergence
        console.print(f"[yellow]first divergence[/yellow] ({record.where}), turn {divergence.turn}, ", end="")
        console.print(f"token {divergence.position}: {divergence.why}", markup=False)
    if verdict.first is None:
        console.print("[green]ok[/green]: exactly the sampled tokens are trained")
        return
    record, fault = verdict.first
    console.print(f"[red]first fault[/red] ({record.where}): ", end="")
    console.print(str(fault), markup=False)
    console.print(_excerpt(record, fault.position, template))


def _rows(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "trajectories", f"{verdict.trajectories:,}"
    yield "turns", f"{verdict.turns:,}"
    yield "trained tokens", f"{verdict.trained:,}"
    yield "tokens of context", f"{verdict.context:,}"
    yield "other than a fresh rendering", f"{verdict.diverging:,}"
    kinds = ", ".join(f"{kind} {count}" for kind, count in verdict.kinds.most_common())
    yield "with a fault", f"{verdict.faulty:,}" + (f" ({kinds})" if kinds else "")


def _excerpt(record: Record, position: int, template: ChatTemplate) -> Text:
    """The ids around a fault: trained ones green, context dim, the place itself reversed."""
    text = Text()
    start = max(0, position - _AROUND)
    for at, item in enumerate(record.response_ids[start : position + _AROUND], start):
        style = "green" if record.mask[at] else "dim"
        text.append(_printable(template.decode([item])), f"reverse {style}" if at == position else style)
    return text


def _printable(text: str) -> str:
    """A policy may write anything, what steers a terminal included."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
