"""The funnel: what is counted, and that table and plot show it."""

import io
import json

import pytest
from rich.console import Console

from rltr_verl.coldstart.funnel import STAGES, Funnel
from rltr_verl.coldstart.ledger import Candidate, Reason
from rltr_verl.coldstart.records import Outcome
from rltr_verl.coldstart.store import Folder
from rltr_verl.errors import DiskError


def candidate(query, number, reason, score=None, difficulty="easy", **figures):
    item = Candidate(f"{query}/{number}", query, number, Outcome.OK, difficulty, score=score, **figures)
    item.settle(reason)
    return item


CANDIDATES = [
    candidate("a", 0, Reason.BEST, 1.0),
    candidate("a", 1, Reason.NOT_BEST, 2 / 3),
    candidate("a", 2, Reason.MALFORMED, format=("two_answers", "truncated")),
    candidate("b", 0, Reason.BELOW_THRESHOLD, 0.0),
    candidate("b", 1, Reason.POLICY_ERROR, policy_errors={"unknown_tool": 2}),
    candidate("c", 0, Reason.BALANCE, 1.0, "hard"),
    candidate("c", 1, Reason.UNSCORED, difficulty="hard"),
    candidate("d", 0, Reason.FAILED, difficulty="hard"),
]


@pytest.fixture
def funnel():
    return Funnel.of(CANDIDATES, "the rows' needs")


def test_every_reason_that_drops_belongs_to_exactly_one_stage():
    assert [reason for _, reasons in STAGES for reason in reasons] == [item for item in Reason if item != Reason.BEST]


def test_what_is_left_after_each_rule(funnel):
    assert [(stage.name, stage.samples, stage.queries) for stage in funnel.stages] == [
        ("sampled", 8, 4),
        ("played", 7, 3),
        ("well formed", 6, 3),
        ("no policy error", 5, 3),
        ("no tool fault", 5, 3),
        ("not held out", 5, 3),
        ("scored", 4, 3),
        ("complete", 3, 2),
        ("best of n", 2, 2),
        ("balanced", 1, 1),
    ]
    assert funnel.stages[-1].share == 1 / 8 and funnel.kept == 1 and funnel.queries == 4


def test_yield_by_difficulty_and_what_was_lost(funnel):
    easy, hard = funnel.difficulties["easy"], funnel.difficulties["hard"]
    assert (easy.queries, easy.samples, easy.complete, easy.kept, easy.queries_kept, easy.share) == (2, 5, 2, 1, 1, 0.5)
    assert (hard.queries, hard.samples, hard.complete, hard.kept, hard.queries_kept, hard.share) == (2, 3, 1, 0, 0, 0.0)
    assert funnel.lost == {"failed": 1, "below_threshold": 1, "balance": 1}
    assert funnel.details == {"format": {"truncated": 1, "two_answers": 1}, "policy_errors": {"unknown_tool": 1}}
    assert funnel.scores == {"0.00": 1, "0.67": 1, "1.00": 2}
    assert sum(funnel.reasons.values()) == len(CANDIDATES)


def test_files(funnel, tmp_path):
    funnel.write(Folder(tmp_path))
    written = json.loads((tmp_path / "funnel.json").read_text())
    assert written["stages"][0] == {"name": "sampled", "samples": 8, "queries": 4, "share": 1.0}
    assert written["reasons"]["best"] == 1 and written["judge"] == "the rows' needs"
    assert (tmp_path / "funnel.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("names", [[], ["困难", "$x$", "a" * 80], [str(number) for number in range(90)]])
def test_any_difficulties_can_be_drawn_without_a_warning(names, tmp_path, recwarn):
    candidates = [candidate(f"q{place}", 0, Reason.BEST, 1.0, name) for place, name in enumerate(names)]
    Funnel.of(candidates, "x").write(Folder(tmp_path))
    assert (tmp_path / "funnel.png").stat().st_size > 1000 and not [str(item.message) for item in recwarn]


def test_tables(funnel):
    console = Console(width=80, record=True, file=io.StringIO())
    for table in funnel.tables():
        console.print(table)
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["complete", "3", "2", "37.5%"] in rows
    assert ["below_threshold", "1"] in rows
    assert ["easy", "2", "5", "2", "1", "1", "(50.0%)"] in rows


def test_a_folder_that_cannot_be_written(funnel, tmp_path):
    with pytest.raises(DiskError, match="cannot be written"):
        funnel.write(Folder(tmp_path / "none"))
