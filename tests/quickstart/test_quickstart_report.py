"""Summary, page and table. What a policy or a tool wrote is data there, never markup."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser

import pytest
from rich.console import Console

from rltr_verl.quickstart import run_quickstart
from rltr_verl.quickstart.options import Options, Paths
from rltr_verl.quickstart.report import write_report
from rltr_verl.quickstart.samples import pick_samples, steps_of
from rltr_verl.quickstart.stages import STAGES
from rltr_verl.quickstart.state import RunState
from rltr_verl.trajectory import Observation, ToolCall, Trajectory, Turn

HOSTILE = '</code></li><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7*7 }} [bold red]x[/bold] "q" &amp;'
FIRST = {"completeness": 0.2, "reward": 0.1, "calls": 1.0, "penalties": 0.0, "timing_s/step": 9.0}
CURVES = {1: FIRST, 2: {**FIRST, "completeness": 0.6, "response_length/mean": 50.0, "timing_s/step": 2.0}}


def trajectory(*results: str) -> Trajectory:
    turns = [
        Turn("x", calls=(ToolCall("search", {"query": HOSTILE}, "raw"),), observations=(Observation(text),))
        for text in results
    ]
    return Trajectory(HOSTILE, (*turns, Turn("<answer>", stopped=True)))


def record(kind: str, completeness: float, one: Trajectory) -> dict:
    figures = {"completeness": completeness, "calls": float(one.n_calls), "reward": completeness, "format_ok": 1.0}
    return {
        "index": 0,
        "split": "val",
        "kind": kind,
        "lang": "en",
        "query": HOSTILE,
        **figures,
        "trajectory": one.to_dict(),
    }


def figures(completeness: float, calls: float) -> dict:
    one = {"n": 4, "completeness": completeness, "calls": calls, "reward": completeness, "format_ok": 1.0}
    return {**one, "kinds": {"look": dict(one), "days": dict(one)}}


@pytest.fixture
def finished(tmp_path):
    """A run with everything but its report."""
    paths, options = Paths(tmp_path), Options(out=tmp_path, seed=4, overrides=(f"trainer.project_name={HOSTILE}",))
    state = RunState(paths.state, options.fingerprint())
    state.finish("gate", {"steps": 650, "model": "m", "format_ok": 1.0, "multi_call": 0.3, "n_prompts": 16})
    state.finish("rl", {"steps": 2, "model": "m"})
    for when, completeness, calls in (("before", 0.25, 1.0), ("after", 0.75, 2.0)):
        state.finish(when, {"val": figures(completeness, calls), "val_unseen": figures(completeness - 0.1, calls)})
        lines = [
            record("look", float(when == "after"), trajectory(*["r"] * int(calls))),
            record("days", 0.0, trajectory(HOSTILE)),
        ]
        paths.evaluation.mkdir(exist_ok=True)
        (paths.evaluation / f"{when}_val.jsonl").write_text("".join(json.dumps(item) + "\n" for item in lines))
    with state.running("report"):
        pass
    return options, paths, state


class Tags(HTMLParser):
    """Collects the tags and attributes that a browser would see, and all text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def test_hostile_text_stays_text(finished):
    options, paths, state = finished
    output = io.StringIO()
    write_report(options, paths, state, CURVES, Console(file=output, width=200, color_system=None))
    page = Tags()
    page.feed(paths.report.read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert page.tags.count("img") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert HOSTILE in page.text
    assert "49" not in page.text
    assert "[bold red]x[/bold]" in output.getvalue()


def test_the_page_is_one_file_that_loads_nothing(finished):
    options, paths, state = finished
    write_report(options, paths, state, CURVES, Console(file=io.StringIO()))
    page = Tags()
    page.feed(paths.report.read_text(encoding="utf-8"))
    links = [value for name, value in page.attributes if name in ("src", "href")]
    assert len(links) == 1 and links[0].startswith("data:image/png;base64,")
    assert paths.curves.read_bytes().startswith(b"\x89PNG")


def test_the_summary_holds_what_is_promised(finished):
    options, paths, state = finished
    write_report(options, paths, state, CURVES, Console(file=io.StringIO()))
    summary = json.loads(paths.summary.read_text())
    assert summary["completeness_before"] == 0.25 and summary["completeness_after"] == 0.75
    assert summary["completeness_unseen_before"] == pytest.approx(0.15)
    assert summary["completeness_unseen_after"] == pytest.approx(0.65)
    assert (summary["calls_before"], summary["calls_after"]) == (1.0, 2.0)
    assert (summary["seed"], summary["algo"]) == (4, "grpo")
    assert summary["step_seconds"] == 5.5
    assert summary["minutes"] >= 0
    assert set(summary["kinds"]["look"]) == {
        "n",
        "completeness_before",
        "completeness_after",
        "calls_before",
        "calls_after",
    }
    assert {"verl", "torch", "transformers", "ray", "python", "rltr_verl"} == set(summary["versions"])


def test_the_table_shows_each_kind_and_both_splits(finished):
    options, paths, state = finished
    output = io.StringIO()
    write_report(options, paths, state, CURVES, Console(file=output, width=120, color_system=None))
    rows = {
        cells[1].strip(): cells[2:7]
        for cells in (row.split("│") for row in output.getvalue().splitlines())
        if len(cells) > 6
    }
    assert [cell.strip() for cell in rows["all of val"]] == ["8", "0.25", "0.75", "1.00", "2.00"]
    assert set(rows) == {"days", "look", "all of val", "all of val_unseen"}


def test_a_run_without_logged_steps_still_gets_its_report(finished):
    options, paths, state = finished
    summary = write_report(options, paths, state, {}, Console(file=io.StringIO()))
    assert summary["step_seconds"] is None
    assert paths.report.exists()


def test_samples_are_those_that_changed_most_one_per_kind():
    one, two = trajectory("r"), trajectory("r", "r")
    before = [record("look", 1.0, one), record("days", 0.0, one), record("days", 0.0, one), record("sum", 0.0, one)]
    after = [record("look", 1.0, one), record("days", 1.0, one), record("days", 1.0, two), record("sum", 0.0, two)]
    picked = pick_samples(before, after)
    assert [sample.kind for sample in picked] == ["days", "sum"]
    assert sum(step.role == "call" for step in picked[0].after) == 2


def test_an_unreadable_call_and_a_plain_answer_are_shown_as_written():
    bad = Turn("t", calls=(ToolCall(None, None, "{broken", "no JSON"),), observations=(Observation("Error: x"),))
    shown = steps_of(Trajectory("q", (bad, Turn("It is 5."))))
    assert [(step.role, step.text) for step in shown] == [
        ("call", "unreadable call: {broken"), ("result", "Error: x"), ("text", "It is 5."),
    ]  # fmt: skip


def test_a_finished_run_that_is_run_again_shows_its_table(finished, tmp_path):
    options, paths, state = finished
    values = write_report(options, paths, state, CURVES, Console(file=io.StringIO()))
    again = Options(out=tmp_path / "again")
    again.out.mkdir()
    done = RunState(Paths(again.out).state, again.fingerprint())
    for stage in STAGES:
        done.finish(stage.name, values if stage is STAGES[-1] else {})
    output = io.StringIO()
    assert run_quickstart(again, console=Console(file=output, width=120)) == values
    assert "all of val_unseen" in output.getvalue() and output.getvalue().count("done before") == len(STAGES)
