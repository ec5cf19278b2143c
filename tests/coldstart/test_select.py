"""Selection with the checklist as the judge: every rule, its order, and what the files say."""

import json
import random

import pytest

from rltr_verl.coldstart.records import Outcome, Sample
from rltr_verl.coldstart.select import SelectOptions, select
from rltr_verl.config import load_settings
from rltr_verl.errors import ConfigError, DataError, JudgeOutage
from rltr_verl.trajectory import Trajectory
from tests.coldstart.made import GOOD, POOR, SEARCH, call, ledger, lines, played, reasons, sample, write

CHECKLIST = load_settings({"judge": {"backend": "checklist"}})
FILES = ("selected.jsonl", "ledger.jsonl", "funnel.json")


def run(folder, *samples, settings=CHECKLIST, **options):
    write(folder, *samples)
    return select(folder, settings, SelectOptions(**options))


def kept(folder):
    return [line["id"] for line in lines(folder / "selected.jsonl")]


def test_each_rule_has_its_reason(tmp_path):
    held_out = tmp_path / "val.jsonl"
    held_out.write_text(json.dumps({"query": "Held out?"}))
    samples = [
        sample("a", trajectory=None, outcome=Outcome.EMPTY, why="no text"),
        sample("b", trajectory=None, outcome=Outcome.REFUSAL, why="declines: sorry"),
        sample("c", outcome=Outcome.DUPLICATE),
        sample("d", trajectory=None, outcome=Outcome.FAILED, why="HTTP 500"),
        sample("e", trajectory=Trajectory("q", (*GOOD.turns, *GOOD.turns))),
        sample("f", trajectory=played(call("serch", query="arlen"), call(query="arlen"))),
        sample("g", query="held out", trajectory=GOOD),
        sample("h", trajectory=POOR),
        sample("i", 0, trajectory=played(call(query="arlen"), call(query="arlen now"))),
        sample("i", 1),
    ]
    run(tmp_path, *samples, held_out=(held_out,))
    assert reasons(tmp_path) == {
        "a/0": "empty",
        "b/0": "refusal",
        "c/0": "duplicate",
        "d/0": "failed",
        "e/0": "malformed",
        "f/0": "policy_error",
        "g/0": "contaminated",
        "h/0": "below_threshold",
        "i/0": "not_best",
        "i/1": "best",
    }
    said = {name: line["detail"] for name, line in ledger(tmp_path).items()}
    assert said["a/0"] == "no text" and said["e/0"] == "two_answers" and said["f/0"] == "unknown_tool 1"
    assert said["g/0"] == f"exact 1.00: {held_out}, row 1: held out"
    assert said["h/0"] == "score 0.00, wanted: more than 0.5"
    assert said["i/0"] == "place 2 of 2; the first is i/1"
    assert kept(tmp_path) == ["i/1"]


def test_a_line_of_the_ledger(tmp_path):
    run(tmp_path, sample("q", 3, difficulty=2))
    assert ledger(tmp_path)["q/3"] == {
        "id": "q/3",
        "query_id": "q",
        "number": 3,
        "outcome": "ok",
        "format": [],
        "policy_errors": {},
        "tool_faults": 0,
        "n_calls": 1,
        "length": sum(len(turn.text) for turn in GOOD.turns),
        "votes": [1.0],
        "score": 1.0,
        "difficulty": "2",
        "kept": True,
        "reason": "best",
        "detail": "place 1 of 1",
    }


def test_the_selection_holds_the_samples_as_they_were_sampled(tmp_path):
    written = [sample("b", query="Wie warm ist Arlen? 阿伦"), sample("a"), sample("a", 1, trajectory=POOR)]
    run(tmp_path, *written)
    found = [Sample.from_dict(line) for line in lines(tmp_path / "selected.jsonl")]
    assert found == [written[1], written[0]]


@pytest.mark.parametrize("end", ["done", "<answer>"])
def test_case_s06a_a_policy_error_drops_the_whole_trajectory(tmp_path, end):
    """An unknown tool in the first turn, then a good call: dropped, not masked; with and without the stop marker."""
    messages = [
        {"role": "assistant", "content": '<tool_call>\n{"name":"serch","arguments":{}}\n</tool_call>'},
        {"role": "tool", "content": "Unknown function"},
        {"role": "assistant", "content": call(query="arlen")},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": end},
    ]
    run(tmp_path, sample(trajectory=Trajectory.from_messages(messages, "q", tools=[SEARCH])))
    (line,) = lines(tmp_path / "ledger.jsonl")
    assert not line["kept"] and line["policy_errors"] == {"unknown_tool": 1} and line["votes"] == []
    assert line["reason"] == ("policy_error" if end == "<answer>" else "malformed")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<tool_call>{</tool_call>", "unreadable"),
        (call("lookup", query="arlen"), "unknown_tool"),
        (call(text="arlen"), "bad_arguments"),
    ],
)
def test_every_kind_of_policy_error(tmp_path, text, kind):
    run(tmp_path, sample(trajectory=played(text, call(query="arlen"))))
    (line,) = lines(tmp_path / "ledger.jsonl")
    assert (line["reason"], line["detail"]) == ("policy_error", f"{kind} 1")


@pytest.mark.parametrize("status", ["timeout", "infrastructure", "tool_failed"])
def test_a_fault_of_a_tool_is_not_the_teachers(tmp_path, status):
    retried = Trajectory(
        GOOD.query, (played(call(query="arlen"), status=status).turns[0], *GOOD.turns), tuple(GOOD.tools)
    )
    run(tmp_path, sample(trajectory=retried))
    assert reasons(tmp_path) == {"q1/0": "best"} and ledger(tmp_path)["q1/0"]["tool_faults"] == 1
    run(tmp_path, sample(trajectory=retried), tool_faults="drop")
    assert ledger(tmp_path)["q1/0"]["detail"] == "1 of 2 calls" and reasons(tmp_path) == {"q1/0": "tool_fault"}


def test_the_last_line_of_a_sample_holds_and_a_torn_one_does_not(tmp_path):
    write(tmp_path, sample("a", trajectory=None, outcome=Outcome.FAILED), sample("b"), sample("a"))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(json.dumps(sample("b", trajectory=POOR).to_dict())[:200])
    select(tmp_path, CHECKLIST)
    assert reasons(tmp_path) == {"a/0": "best", "b/0": "best"}


def test_the_order_of_the_file_does_not_matter_and_a_rerun_writes_the_same_bytes(tmp_path):
    texts = [call(query=f"arlen {number}" * (1 + number % 3)) for number in range(4)]
    pool = [
        sample(f"q{query}", number, trajectory=played(*texts[: 1 + (query + number) % 4]), difficulty=query % 3)
        for query in range(12)
        for number in range(4)
    ]
    found = []
    for turn in range(3):
        folder = tmp_path / str(turn // 2)  # the second run is a rerun in the first one's folder
        random.Random(turn // 2).shuffle(pool)
        run(folder, *pool, keep=2, balance="equal")
        found.append([(folder / name).read_bytes() for name in FILES])
    assert found[0] == found[1] == found[2]
    assert sum(line["kept"] for line in ledger(tmp_path / "0").values()) == 24


def test_keep_and_min_score(tmp_path):
    half = load_settings({"judge": {"backend": "checklist", "credit": "fraction"}})
    two = [{"tool": "search", "arguments": {"query": ["arlen"]}}, {"tool": "search", "arguments": {"query": ["brona"]}}]
    samples = [sample("q", number, needs=json.dumps(two)) for number in range(3)]
    run(tmp_path, *samples, settings=half)
    assert set(reasons(tmp_path).values()) == {"below_threshold"}
    run(tmp_path, *samples, settings=half, min_score=0.5, keep=2)
    assert kept(tmp_path) == ["q/0", "q/1"]


def test_balance_by_difficulty(tmp_path):
    samples = [sample(f"easy{number}", difficulty="easy") for number in range(6)]
    samples += [sample("hard1", difficulty="hard"), sample("hard2", difficulty="hard")]
    samples += [sample("x1"), sample("x2"), sample("x3", difficulty=" ")]
    run(tmp_path, *samples, balance="equal", balance_ratio=1.5)
    found = [line for line in ledger(tmp_path).values() if line["kept"]]
    count = {name: sum(line["difficulty"] == name for line in found) for name in ("easy", "hard", "not given")}
    assert count == {"easy": 3, "hard": 2, "not given": 3}
    dropped = [line for line in ledger(tmp_path).values() if line["reason"] == "balance"]
    assert {line["detail"] for line in dropped} == {"difficulty easy has 6, the cap is 3"}


def test_rows_without_needs_are_unscored_and_never_0(tmp_path):
    samples = [sample("a"), sample("b", needs=None), sample("c")]
    run(tmp_path, *samples)
    line = ledger(tmp_path)["b/0"]
    assert (line["reason"], line["score"], line["votes"]) == ("unscored", None, [])
    assert "no 'needs'" in line["detail"] and kept(tmp_path) == ["a/0", "c/0"]
    with pytest.raises(JudgeOutage, match="2 of 2 candidates could not be judged.*judge.backend=endpoint"):
        run(tmp_path / "none", sample("a", needs=None), sample("b", needs=None))


def test_a_query_that_needs_no_tool(tmp_path):
    run(tmp_path, sample("a", trajectory=played(), needs="[]"))
    assert kept(tmp_path) == ["a/0"]


@pytest.mark.parametrize(
    "options", [{"keep": 0}, {"min_score": 1.2}, {"near": 0.0}, {"balance_ratio": 0.0}, {"near": 1.1}]
)
def test_options_out_of_range(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SelectOptions(**options)


def test_a_folder_without_samples(tmp_path):
    with pytest.raises(DataError, match=r"samples.jsonl: no samples here. Fix: sample first"):
        select(tmp_path, CHECKLIST)


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "a/0"}', "null"])
def test_a_line_that_is_no_sample_is_named(tmp_path, line):
    write(tmp_path, sample("a"))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"samples.jsonl, line 2: no sample .* Fix: delete the line"):
        select(tmp_path, CHECKLIST)


def test_unreadable_needs_are_the_rows_fault(tmp_path):
    with pytest.raises(DataError, match="row b/0: field 'needs' is not valid JSON"):
        run(tmp_path, sample("a"), sample("b", needs="{"))


def test_an_empty_file_gives_an_empty_selection(tmp_path):
    funnel = run(tmp_path)
    assert funnel.kept == 0 and lines(tmp_path / "ledger.jsonl") == lines(tmp_path / "selected.jsonl") == []
