"""From verl's files to figures."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from rltr_verl.quickstart.curves import TrajectoryFigures, read_curves
from rltr_verl.quickstart.plot import moving_mean
from rltr_verl.quickstart.progress import MetricsTail, progress_bar, read_metrics, rl_note, sft_note


def line(step: int, **data: float | None) -> str:
    return json.dumps({"step": step, "data": data}) + "\n"


def record(step: int, total: float | None, **metrics: float) -> str:
    return json.dumps({"global_steps": step, "total": total, "metrics": metrics}) + "\n"


def test_a_growing_file_is_read_once_and_line_by_line(tmp_path):
    path = tmp_path / "m.jsonl"
    tail = MetricsTail(path)
    assert tail.new() == []
    with path.open("w") as file:
        file.write(line(1, a=0.5) + line(2, a=0.6)[:-9])
        file.flush()
        assert tail.new() == [(1, {"a": 0.5})]
        assert tail.new() == []
        file.write(line(2, a=0.6)[-9:])
        file.flush()
        assert tail.new() == [(2, {"a": 0.6})]


def test_values_that_are_no_numbers_are_left_out(tmp_path):
    (tmp_path / "m.jsonl").write_text(line(1, a=None, b=2.0))  # NaN arrives as null
    assert MetricsTail(tmp_path / "m.jsonl").new() == [(1, {"b": 2.0})]


def test_where_a_resumed_run_repeats_steps_the_later_file_counts(tmp_path):
    (tmp_path / "rl-001.jsonl").write_text(line(1, a=1) + line(2, a=1) + line(3, a=1))
    (tmp_path / "rl-002.jsonl").write_text(line(2, a=2) + line(3, a=2))
    found = read_metrics(sorted(tmp_path.glob("*.jsonl")))
    assert {step: values["a"] for step, values in found.items()} == {1: 1, 2: 2, 3: 2}


def test_step_figures_are_means_over_the_trajectories_of_all_processes(tmp_path):
    figures = TrajectoryFigures(tmp_path)
    assert figures.read() == {}
    first = record(1, 1.0, acc=1, calls=2, repeat=0, error=-0.2, format_ok=1)
    (tmp_path / "a.jsonl").write_text(first)
    assert figures.read()[1]["completeness"] == 1.0
    (tmp_path / "b.jsonl").write_text(record(1, -1.0, acc=0, calls=4, repeat=-0.1, error=0, format_ok=0))
    assert figures.read() == {
        1: {"calls": 3.0, "completeness": 0.5, "format_ok": 0.5, "penalties": pytest.approx(-0.15), "reward": 0.0}
    }


def test_an_unscored_trajectory_has_no_reward_and_no_completeness(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        record(1, None, calls=4, format_ok=1) + record(1, 0.5, acc=1, calls=2, format_ok=1)
    )
    assert TrajectoryFigures(tmp_path).read()[1] == {
        "calls": 3.0, "completeness": 1.0, "format_ok": 1.0, "penalties": 0.0, "reward": 0.5,
    }  # fmt: skip


def test_curves_join_dumps_and_metrics_and_the_later_attempt_counts(tmp_path):
    for attempt, acc in (("rl-001", 0), ("rl-002", 1)):
        (tmp_path / attempt).mkdir()
        (tmp_path / attempt / "x.jsonl").write_text(record(2, acc, acc=acc, calls=1, format_ok=1))
    (tmp_path / "rl-001" / "x.jsonl").open("a").write(record(1, 0, acc=0, calls=1, format_ok=1))
    (tmp_path / "m.jsonl").write_text(line(2, **{"timing_s/step": 3.0, "perf/other": 1.0}))
    curves = read_curves([tmp_path / "rl-001", tmp_path / "rl-002"], [tmp_path / "m.jsonl"])
    assert list(curves) == [1, 2]
    assert curves[2]["completeness"] == 1 and curves[2]["timing_s/step"] == 3.0
    assert "perf/other" not in curves[2]


def test_the_bar_shows_steps_and_the_current_figures():
    output = io.StringIO()
    console = Console(file=output, width=80, force_terminal=True, color_system=None)
    with progress_bar(console, "rl", 25) as bar:
        assert "starting" in _last(output, bar)
        bar.to(7, rl_note({"reward": 0.41, "completeness": 0.5, "timing_s/step": 1.9}))
        shown = _last(output, bar)
    assert "7/25" in shown and "reward 0.41" in shown and "complete 0.50" in shown


def test_notes_show_only_what_is_there():
    assert sft_note(3, {"train/loss": 0.1234}) == "loss 0.123"
    assert sft_note(3, {}) == "" == rl_note({})


def _last(output: io.StringIO, bar) -> str:
    bar._progress.refresh()
    return output.getvalue()


def test_the_moving_mean_never_looks_ahead():
    assert moving_mean([1, 3, 5, 7, 9, 11]) == [1, 2, 3, 4, 5, 7]
