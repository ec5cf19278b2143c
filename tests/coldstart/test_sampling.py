"""Sampling: what is written, what a rerun does, what ends a run."""

from __future__ import annotations

import io
import json
import random
from collections import Counter

import pytest
from rich.console import Console

from rltr_verl.coldstart.progress import note, shown
from rltr_verl.coldstart.queries import QueryOptions
from rltr_verl.coldstart.recording import Summary, line_of
from rltr_verl.coldstart.records import Outcome, Task, Usage
from rltr_verl.coldstart.samples import read_samples
from rltr_verl.coldstart.sampling import SampleOptions, SamplingStopped, sample
from rltr_verl.coldstart.store import Appender, Folder
from rltr_verl.coldstart.teacher import TeacherFailed
from rltr_verl.config import load_settings
from rltr_verl.errors import ConfigError, DataError, DiskError
from tests.coldstart.sampling_kit import Kit, Typist, ids_of, lines_of, towns, unlike, write_queries


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    return Kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture
def play(kit, tmp_path):
    """``play(teacher, rows=, n=, ...)``: a run in ``tmp_path/cs``."""

    def run(teacher, rows=None, n=2, seed=1, strict=False, settings=None, watch=None, **changes):
        queries = write_queries(tmp_path / "q.jsonl", *(towns(3) if rows is None else rows))
        options = SampleOptions(n, seed, QueryOptions(strict))
        settings = settings or kit.settings(**changes)
        return sample(
            tmp_path / "cs", queries, settings, str(kit.model), options, watch=watch, build=lambda *_: teacher
        )

    run.folder = tmp_path / "cs"
    return run


WANTED = ["t0/0", "t0/1", "t1/0", "t1/1", "t2/0", "t2/1"]


def test_every_sample_is_written_once_with_its_seed_and_usage(play):
    teacher = Typist(unlike)
    summary = play(teacher)
    assert (summary.total, summary.done, summary.kept, summary.left, summary.yielded) == (6, 6, 6, 0, 1.0)
    assert sorted(ids_of(play.folder)) == WANTED and teacher.closed
    first = next(read_samples(Folder(play.folder)))
    assert first.teacher == "m" and first.usage.cost == 0.5 and first.trajectory.turns[0].calls
    assert (summary.usage.prompt_tokens, summary.usage.cost) == (60, 3.0)
    assert len({line["task"]["seed"] for line in lines_of(play.folder)}) == 6


def test_no_more_than_the_window_is_under_way_and_tasks_are_made_on_the_fly(play):
    teacher = Typist(unlike, delay_s=0.01)
    play(teacher, rows=towns(50), n=4, concurrency=4)
    assert teacher.peak == 6 and len(teacher.tasks) == 200


def test_case_s07a_a_rerun_makes_exactly_what_is_missing(play):
    play(Typist(unlike))
    file = Folder(play.folder).samples
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [lines[0], lines[2], lines[3]]
    file.write_bytes(b"".join(kept) + lines[1][:100])  # killed in the middle of a line
    teacher = Typist(unlike)
    summary = play(teacher)
    assert len(teacher.tasks) == 3 and summary.made == 3 and summary.done == 6
    assert sorted(line["id"] for line in lines_of(play.folder)) == WANTED
    assert file.read_bytes().startswith(b"".join(kept))
    assert play(Typist(unlike)).made == 0


def test_n_may_grow_and_queries_may_be_added(play):
    play(Typist(unlike), n=1)
    grown = Typist(unlike)
    play(grown, rows=[*towns(3), {"query": "new", "id": "x"}], n=2)
    assert sorted(grown.tasks) == ["t0/1", "t1/1", "t2/1", "x/0", "x/1"]
    fewer = play(Typist(unlike), rows=towns(2), n=1)
    assert (fewer.total, fewer.done, fewer.made) == (2, 2, 0)


def test_duplicates_are_told_also_after_a_restart_and_per_query(play):
    assert play(Typist(lambda _: "ok plan"), n=2).outcomes == {Outcome.OK: 3, Outcome.DUPLICATE: 3}
    summary = play(Typist(lambda _: "ok  plan\n"), n=3)
    assert summary.outcomes == {Outcome.OK: 3, Outcome.DUPLICATE: 6} and summary.made == 3
    assert {sample.reason for sample in read_samples(Folder(play.folder)) if sample.outcome is Outcome.DUPLICATE} == {
        "the same turns as an earlier sample of the query"
    }


def test_failures_are_written_counted_and_tried_again_and_the_newest_line_counts(play):
    def write(task: Task) -> str | Exception:
        return TeacherFailed("down") if task.number == 1 else unlike(task)

    summary = play(Typist(write), concurrency=8)
    assert (summary.kept, summary.failed, summary.left, summary.reasons) == (3, 3, 3, {"down": 3})
    assert [sample.outcome for sample in read_samples(Folder(play.folder))] == [Outcome.OK] * 3 + [Outcome.FAILED] * 3
    again = play(Typist(lambda task: TeacherFailed("still") if task.id == "t0/1" else unlike(task)), concurrency=8)
    assert (again.made, again.failed, again.done) == (3, 1, 5)
    samples = {sample.id: sample for sample in read_samples(Folder(play.folder))}
    assert sorted(samples) == WANTED and samples["t0/1"].reason == "still" and samples["t1/1"].outcome is Outcome.OK
    assert len(lines_of(play.folder)) == 9
    assert play(Typist(unlike)).left == 0


def test_a_wrong_row_that_only_the_teacher_sees_is_a_failure_of_its_own(play):
    teacher = Typist(lambda task: DataError("no plan") if task.query_id == "t1" else unlike(task))
    summary = play(teacher)
    assert (summary.kept, summary.failed) == (4, 2) and summary.reasons == {"no plan": 2}


def test_a_fatal_failure_stops_at_once_and_loses_nothing(play):
    def write(task: Task) -> str | Exception:
        return TeacherFailed("HTTP 401: wrong key", fatal=True) if task.id == "t2/0" else unlike(task)

    teacher = Typist(write)
    with pytest.raises(SamplingStopped, match="the teacher cannot go on: HTTP 401: wrong key.*run the same command"):
        play(teacher, rows=towns(40), concurrency=1)
    written = lines_of(play.folder)
    assert teacher.closed and len(written) < 10
    assert {"t0/0", "t1/0"} <= {line["id"] for line in written if line["outcome"] == "ok"}
    assert play(Typist(unlike), rows=towns(40), concurrency=1).left == 0
    assert len(ids_of(play.folder)) == len(set(ids_of(play.folder))) == 80


def test_failures_without_a_success_stop_the_run_and_ones_with_successes_between_do_not(play):
    with pytest.raises(SamplingStopped, match="the last 6 attempts have all failed; the last one: refused"):
        play(Typist(lambda _: TeacherFailed("refused")), rows=towns(40), concurrency=2)
    mixed = Typist(lambda task: unlike(task) if random.Random(task.id).random() < 0.5 else TeacherFailed("refused"))
    summary = play(mixed, rows=towns(40), concurrency=8)
    assert summary.made == 80 and summary.failed > 24


def test_an_error_in_the_program_is_not_taken_for_a_failure(play):
    with pytest.raises(ZeroDivisionError):
        play(Typist(lambda task: ZeroDivisionError() if task.id == "t1/0" else unlike(task)))


def test_the_budget_is_that_of_the_folder(play):
    limited = {"budget": {"money": 3.9, "price_prompt": 1.0}, "concurrency": 1}
    with pytest.raises(SamplingStopped, match="rltr.teacher.budget.money: .* spent, the limit is 3.9"):
        play(Typist(unlike), rows=towns(40), **limited)
    assert 8 <= len(lines_of(play.folder)) <= 9  # one more was in flight
    teacher = Typist(unlike)
    with pytest.raises(SamplingStopped, match="raise rltr.teacher.budget.money to go on"):
        play(teacher, rows=towns(40), **limited)
    assert not teacher.tasks
    limited["budget"] = {"money": 99.0, "price_prompt": 1.0}
    assert play(Typist(unlike), rows=towns(40), **limited).left == 0


def test_another_way_of_sampling_is_refused_with_every_difference_and_its_fix(play, kit):
    play(Typist(unlike))
    before = Folder(play.folder).samples.read_bytes()
    teacher = Typist(unlike)
    with pytest.raises(ConfigError) as caught:
        play(teacher, seed=2, n=3, temperature=0.2, model="other", rollout={"max_turns": 3})
    text = str(caught.value)
    assert "seed: 1 before, 2 now (--seed 1)" in text
    assert "teacher.temperature: 0.7 before, 0.2 now (--set 'teacher.temperature=0.7')" in text
    assert "teacher.model: m before, other now" in text and "rollout.max_turns: 10 before, 3 now" in text
    assert not teacher.tasks and Folder(play.folder).samples.read_bytes() == before


def test_another_tool_or_tokenizer_is_refused(play, kit, tmp_path):
    play(Typist(unlike))
    other = load_settings({**kit.settings().model_dump(), "tools": [str(kit.tool), "calculator"]})
    with pytest.raises(ConfigError, match="tools: .* before, .* now"):
        play(Typist(unlike), settings=other)
    config = json.loads((kit.model / "tokenizer_config.json").read_text())
    template = kit.model / "chat_template.jinja"
    text = template.read_text() if template.exists() else config["chat_template"]
    assert template.exists()
    template.write_text("{# another #}" + text)
    try:
        with pytest.raises(ConfigError, match="the chat template: .* before, .* now"):
            play(Typist(unlike))
    finally:
        template.write_text(text)


def test_a_folder_in_which_all_has_failed_is_free_to_change(play):
    with pytest.raises(SamplingStopped):
        play(Typist(lambda _: TeacherFailed("no such model", fatal=True)), model="mispelt")
    assert play(Typist(unlike), model="m").left == 0
    with pytest.raises(ConfigError, match="teacher.model: m before, mispelt now"):
        play(Typist(unlike), model="mispelt")


def test_urls_limits_and_timeouts_may_change(play):
    play(Typist(unlike), n=1)
    changes = {"url": "http://127.0.0.1:8/v1", "concurrency": 9, "timeout_s": 5, "retries": 0, "deadline_s": 7}
    assert play(Typist(unlike), n=2, **changes).left == 0


def test_a_changed_query_under_the_same_id_is_refused(play):
    play(Typist(unlike))
    with pytest.raises(DataError, match="query 't1': its prompt or its tools are not those"):
        play(Typist(unlike), rows=[*towns(1), {"query": "something else", "id": "t1"}])


def test_samples_without_a_run_file_are_refused(play):
    play(Typist(unlike))
    Folder(play.folder).run.unlink()
    with pytest.raises(ConfigError, match="no run.json"):
        play(Typist(unlike))
    Folder(play.folder).run.write_text("{}\n")
    with pytest.raises(ConfigError, match="does not say how the samples were made"):
        play(Typist(unlike))


def test_a_second_run_on_the_folder_is_refused_while_the_first_is_writing(play):
    with Appender(Folder(play.folder).samples), pytest.raises(DiskError, match="another process is writing"):
        play(Typist(unlike))


def test_bad_rows_are_written_down_or_with_strict_stop_before_anything_is_written(play):
    rows = [*towns(2), b'{"query": "\xff"}', {"query": 3}]
    teacher = Typist(unlike)
    with pytest.raises(DataError, match="2 of 4 rows cannot be used"):
        play(teacher, rows=rows, strict=True)
    assert not teacher.tasks and not play.folder.exists()
    summary = play(teacher, rows=rows)
    assert (summary.skipped, summary.queries, summary.done) == (2, 2, 4)
    skipped = [json.loads(line) for line in Folder(play.folder).skipped.read_text().splitlines()]
    assert [(line["line"], line["field"]) for line in skipped] == [(3, None), (4, "query")]
    play(teacher, rows=rows[:2])
    assert not Folder(play.folder).skipped.exists()


def test_figures_are_shown_while_it_runs_and_at_the_end(play):
    shown = []
    play(Typist(unlike, delay_s=0.3), watch=lambda summary: shown.append((summary.done, summary.eta_s is None)))
    assert shown[0] == (0, True) and shown[-1] == (6, False)


def test_a_line_is_what_the_record_says(play):
    play(Typist(unlike), n=1)
    for line, found in zip(lines_of(play.folder), read_samples(Folder(play.folder)), strict=True):
        assert json.loads(json.dumps(found.to_dict())) == line == json.loads(json.dumps(line_of(found)))


def summary(**changes) -> Summary:
    figures = {"outcomes": Counter({Outcome.OK: 30, Outcome.EMPTY: 10}), "usage": Usage(1200, 300, 0.25)}
    return Summary(**{"total": 100, "made": 20, "seconds": 10.0, **figures, **changes})


def test_progress_tells_yield_failures_tokens_cost_and_time_to_go():
    assert note(summary()) == "40/100  kept 75%  1.5k tokens  cost 0.25  ETA 0:00:30"
    failing = summary(outcomes=Counter({Outcome.OK: 30, Outcome.FAILED: 4}), usage=Usage())
    assert note(failing) == "30/100  kept 100%  failed 4  0 tokens  ETA 0:00:33"
    assert note(Summary(total=5)) == "0/5  0 tokens"


def test_off_a_terminal_a_line_is_printed_now_and_then():
    for every_s, lines in ((0.0, 2), (60.0, 0)):
        console = Console(file=io.StringIO(), width=40)
        with shown(console, every_s) as watch:
            watch(summary())
            watch(summary(made=40))
        assert console.file.getvalue().count("sampling 40/100  kept 75%") == lines


def test_on_a_terminal_there_is_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with shown(console) as watch:
        watch(summary())
    assert "40/100  kept 75%" in console.file.getvalue() and "\r" in console.file.getvalue()
