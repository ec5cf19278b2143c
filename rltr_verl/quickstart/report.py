"""The end of a run: summary, curves, one HTML page, and the figures on the terminal."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rltr_verl.quickstart.curves import Curves
from rltr_verl.quickstart.options import Options, Paths
from rltr_verl.quickstart.plot import plot_curves
from rltr_verl.quickstart.samples import Sample, Step, pick_samples, read_records
from rltr_verl.quickstart.state import RunState
from rltr_verl.quickstart.summary import summary, write_summary

Values = Mapping[str, Any]
STYLES = {"call": "green", "result": "dim", "stop": "bold", "text": "yellow"}
MARKS = {"call": "→", "result": "←", "stop": "■", "text": "✎"}


def write_report(options: Options, paths: Paths, state: RunState, curves: Curves, console: Console) -> dict[str, Any]:
    """Write ``summary.json``, ``curves.png`` and ``report.html``; show table and samples. Returns the summary."""
    values = summary(options, state, curves)
    before, after = (read_records(paths.evaluation / f"{when}_val.jsonl") for when in ("before", "after"))
    samples = pick_samples(before, after)
    plot_curves(curves, paths.curves, f"RLTR on the offline world: {options.algo}, seed {options.seed}")
    write_page(paths.report, values, samples, paths.curves)
    write_summary(paths.summary, values)
    show(console, values, samples)
    console.print(f"\n  {values['minutes']:.1f} minutes. Written: ", end="")
    console.print(", ".join(str(path) for path in (paths.summary, paths.report, paths.curves)), soft_wrap=True)
    return values


def write_page(path: Path, values: Values, samples: Sequence[Sample], curves: Path) -> None:
    """One self-contained page. All text is escaped: what a policy or a tool wrote is data."""
    environment = Environment(
        loader=PackageLoader("rltr_verl.quickstart"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    image = base64.b64encode(curves.read_bytes()).decode("ascii")
    page = environment.get_template("report.html.j2").render(
        values=values, samples=samples, marks=MARKS, image=f"data:image/png;base64,{image}"
    )
    path.write_text(page, encoding="utf-8")


def show(console: Console, values: Values, samples: Sequence[Sample]) -> None:
    """Table and samples on the terminal."""
    console.print()
    console.print(table(values))
    for sample in samples:
        console.print()
        console.print(Text(f"[{sample.kind}] {sample.query}", style="bold"))
        console.print(_lines("before", sample.before, sample.completeness[0]))
        console.print(_lines("after", sample.after, sample.completeness[1]))


def table(values: Values) -> Table:
    """Completeness and calls per kind of query, before and after."""
    title = f"Before and after {values['rl_steps']} steps of {values['algo']} (greedy)"
    found = Table(title=title, title_justify="left")
    found.add_column("queries")
    for name in ("n", "completeness before", "after", "calls before", "after"):
        found.add_column(name, justify="right")
    for kind, row in values["kinds"].items():
        found.add_row(kind, *_cells(row))
    found.add_section()
    found.add_row("all of val", *_cells(overall(values, "kinds", "")), style="bold")
    found.add_row("all of val_unseen", *_cells(overall(values, "kinds_unseen", "_unseen")), style="bold")
    return found


def overall(values: Values, kinds: str, suffix: str) -> dict[str, float]:
    """The figures of a whole split in the form of a kind's."""
    keys = ("completeness", "calls")
    figures = {f"{key}_{when}": values[f"{key}{suffix}_{when}"] for key in keys for when in ("before", "after")}
    return {"n": sum(row["n"] for row in values[kinds].values()), **figures}


def _cells(row: Mapping[str, float]) -> list[str]:
    figures = [row["completeness_before"], row["completeness_after"], row["calls_before"], row["calls_after"]]
    return [str(int(row["n"])), *(f"{value:.2f}" for value in figures)]


def _lines(name: str, steps: Sequence[Step], score: float) -> Text:
    text = Text(f"  {name} (completeness {score:.0f})\n")
    for step in steps:
        text.append(f"    {MARKS[step.role]} {step.text}\n", style=STYLES[step.role])
    text.rstrip()
    return text
