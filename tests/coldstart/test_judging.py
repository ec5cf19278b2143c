"""Judging over real HTTP: who is asked, what is kept, and what happens when the judge fails."""

import asyncio
import json
import re

import pytest

from rltr_verl.coldstart import judging
from rltr_verl.coldstart.judging import choose_judge, teacher_of
from rltr_verl.coldstart.records import Outcome
from rltr_verl.coldstart.select import SelectOptions, select
from rltr_verl.config import TeacherSettings, load_settings
from rltr_verl.errors import ConfigError, DataError, DiskError, JudgeOutage
from tests.coldstart.made import call, ledger, lines, played, reasons, sample, write
from tests.fakes.openai_server import FakeServer, Reply

YES, NO = '{"reason": "all there", "verdict": 1}', '{"reason": "one is missing", "verdict": 0}'
BROKEN = Reply(status=500, body="down")
AT = {"base_url": "http://teacher/v1", "model": "big"}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Lock files of this test alone."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cold"


def samples(count, per_query=1):
    """Different queries, so that the server can tell them apart by their words."""
    return [
        sample(f"q{query:03}", number, trajectory=played(call(query=f"arlen {number}"), query=f"Query {query:03}?"))
        for query in range(count)
        for number in range(per_query)
    ]


async def run(folder, server, options=None, **judge):
    """Select with the server as ``rltr.judge``; in a thread, for it has a loop of its own."""
    base = {"backend": "endpoint", "base_url": server.url, "model": "m", "retries": 0, "verdict_retries": 0}
    settings = load_settings({"judge": {**base, **judge}})
    return await asyncio.to_thread(select, folder, settings, options or SelectOptions())


def by_number(*answers):
    """Answers by the sample's number, which stands in its call."""

    def script(_, payload):
        text = payload["messages"][-1]["content"]
        return next(answer for number, answer in enumerate(answers) if re.search(rf"arlen {number}\b", text))

    return script


async def test_best_of_n_by_the_mean_of_the_votes(folder):
    votes = iter("110" + "111" + "000")
    write(folder, *samples(1, per_query=3))
    async with FakeServer(lambda *_: YES if next(votes) == "1" else NO) as server:
        await run(folder, server, concurrency=1)  # one request at a time, so the votes come in this order
    found = ledger(folder)
    assert [sorted(found[f"q000/{number}"]["votes"]) for number in range(3)] == [[0, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert [found[f"q000/{number}"]["score"] for number in range(3)] == [pytest.approx(2 / 3), 1.0, 0.0]
    assert reasons(folder) == {"q000/0": "not_best", "q000/1": "best", "q000/2": "below_threshold"}
    assert server.count == 9


async def test_half_of_the_votes_are_not_enough_by_default(folder):
    write(folder, *samples(1))
    async with FakeServer([YES, NO]) as server:
        await run(folder, server, n_votes=2)
        assert reasons(folder) == {"q000/0": "below_threshold"}
        await run(folder, server, SelectOptions(min_score=0.5), n_votes=2)
    assert reasons(folder) == {"q000/0": "best"} and server.count == 2


async def test_a_rerun_asks_nothing_and_writes_the_same_bytes(folder):
    write(folder, *samples(6, per_query=2))
    async with FakeServer(by_number(NO, YES)) as server:
        await run(folder, server)
        first = [(folder / name).read_bytes() for name in ("ledger.jsonl", "selected.jsonl", "funnel.json")]
        asked = server.count
        await run(folder, server)
        assert server.count == asked == 36
        assert first == [(folder / name).read_bytes() for name in ("ledger.jsonl", "selected.jsonl", "funnel.json")]
        await run(folder, server, SelectOptions(keep=2, min_score=0.0))
        assert server.count == asked
    assert len(lines(folder / "verdicts.jsonl")) == 12


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"n_votes": 1}, {"language": "zh"}, {"temperature": 0.1}, {"thinking": False}]
)
async def test_another_judge_judges_anew_and_the_first_ones_verdicts_stay(folder, change):
    write(folder, *samples(2))
    async with FakeServer(YES) as server:
        await run(folder, server, n_votes=2)
        await run(folder, server, **{"n_votes": 2, **change})
        asked = server.count
        await run(folder, server, n_votes=2)
    assert asked > 4 and server.count == asked and len(lines(folder / "verdicts.jsonl")) == 4


async def test_a_prompt_of_ones_own_counts_by_its_words(folder, tmp_path):
    write(folder, *samples(1))
    prompt = tmp_path / "mine.txt"
    async with FakeServer(YES) as server:
        for words in ("Judge.", "Judge.", "Judge well."):
            prompt.write_text(f"{words}\n=====\n$tools\n$token\n$record\n$token\nVerdict?")
            await run(folder, server, prompt=str(prompt), n_votes=1)
    assert server.count == 2


async def test_where_the_judge_lives_does_not_matter(folder):
    write(folder, *samples(1))
    async with FakeServer(YES) as one, FakeServer(YES) as two:
        await run(folder, one, timeout_s=20)
        await run(folder, two, concurrency=3)
    assert (one.count, two.count) == (3, 0)


async def test_a_sample_made_anew_is_judged_anew(folder):
    async with FakeServer(YES) as server:
        write(folder, *samples(1))
        await run(folder, server, n_votes=1)
        write(folder, sample("q000", trajectory=played(call(query="something else"), query="Query 000?")))
        await run(folder, server, n_votes=1)
    assert server.count == 2


async def test_what_the_rules_drop_never_reaches_the_judge(folder, tmp_path):
    held_out = tmp_path / "val.jsonl"
    held_out.write_text(json.dumps({"query": "Held out?"}))
    write(
        folder,
        sample("a", trajectory=played(call("serch", query="arlen"))),
        sample("b", trajectory=played("<answer>", call(query="arlen"))),
        sample("c", trajectory=None, outcome=Outcome.REFUSAL),
        sample("d", query="held out"),
        sample("e"),
    )
    async with FakeServer(YES) as server:
        await run(folder, server, SelectOptions(held_out=(held_out,)), n_votes=1)
    assert server.count == 1 and len(lines(folder / "verdicts.jsonl")) == 1
    assert reasons(folder)["e/0"] == "best"


async def test_an_unscored_candidate_is_dropped_and_judged_again(folder):
    write(folder, *samples(1, per_query=3))
    async with FakeServer(by_number(BROKEN, "no verdict", NO)) as server:
        await run(folder, server, n_votes=2, max_unscored_share=0.9)
    found = ledger(folder)
    for name, why in (("q000/0", "HTTP 500"), ("q000/1", "no readable verdict")):
        assert (found[name]["reason"], found[name]["score"], found[name]["votes"]) == ("unscored", None, [])
        assert why in found[name]["detail"]
    assert found["q000/2"]["reason"] == "below_threshold"
    async with FakeServer(by_number(YES, YES, BROKEN)) as server:
        await run(folder, server, n_votes=2, max_unscored_share=0.9)
    assert reasons(folder) == {"q000/0": "best", "q000/1": "not_best", "q000/2": "below_threshold"}
    assert server.count == 4


async def test_some_unreadable_votes_leave_the_mean_of_the_others(folder):
    write(folder, *samples(1))
    async with FakeServer([YES, "?", YES]) as server:
        await run(folder, server)
    line = ledger(folder)["q000/0"]
    assert sorted(line["votes"], key=str) == [1, 1, None] and line["score"] == 1.0


async def test_a_judge_that_is_down_from_the_start_is_one_error(folder):
    write(folder, *samples(3))
    async with FakeServer(BROKEN) as server:
        with pytest.raises(JudgeOutage) as caught:
            await run(folder, server, n_votes=1, max_unscored_share=1)
    said = str(caught.value)
    assert "judge: m (rltr.judge)" in said and "3 of 3 candidates could not be judged" in said and "HTTP 500" in said
    assert not (folder / "ledger.jsonl").exists()


async def test_a_judge_that_stays_down_is_not_waited_for_by_all(folder, monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 5)
    write(folder, *samples(200))
    async with FakeServer(BROKEN) as server:
        with pytest.raises(JudgeOutage, match="5 candidates in a row could not be judged.*run it again"):
            await run(folder, server, n_votes=1, concurrency=4)
    assert server.count < 20


async def test_a_judge_that_dies_half_way_keeps_what_it_said_and_goes_on_later(folder, monkeypatch):
    monkeypatch.setattr(judging, "PATIENCE", 5)
    write(folder, *samples(40))
    async with FakeServer(lambda number, _: YES if number < 21 else BROKEN) as server:
        with pytest.raises(JudgeOutage):
            await run(folder, server, n_votes=1, concurrency=4)
    scored = [line["id"] for line in lines(folder / "verdicts.jsonl") if line["score"] is not None]
    assert len(scored) == 21
    async with FakeServer(YES) as server:
        funnel = await run(folder, server, n_votes=1, concurrency=4)
    assert server.count == 19 and funnel.kept == 40
    asked_again = "".join(request.prompt for request in server.requests)
    assert not any(f"Query {name[1:4]}?" in asked_again for name in scored)


async def test_too_many_unscored_stop_the_selection_unless_told_otherwise(folder):
    write(folder, *samples(1, per_query=4))
    script = by_number(YES, BROKEN, BROKEN, BROKEN)
    async with FakeServer(script) as server:
        with pytest.raises(JudgeOutage, match="3 of 4 candidates could not be judged"):
            await run(folder, server, n_votes=1)
        await run(folder, server, n_votes=1, max_unscored_share=1)
    assert list(reasons(folder).values()) == ["best", "unscored", "unscored", "unscored"]


async def test_a_spent_budget_is_an_outage_and_not_a_score(folder):
    write(folder, *samples(6))
    budget = {"tokens": 250}
    async with FakeServer(Reply(YES, usage=(90, 10))) as server:
        with pytest.raises(JudgeOutage, match="rltr.judge.budget.tokens"):
            await run(folder, server, n_votes=1, concurrency=1, budget=budget, max_unscored_share=0.4)
    assert sum(line["score"] == 1 for line in lines(folder / "verdicts.jsonl")) == 3 == server.count


async def test_no_more_trajectories_at_a_time_than_requests(folder):
    write(folder, *samples(40))
    async with FakeServer(YES, latency_s=0.01) as server:
        await run(folder, server, n_votes=2, concurrency=8)
    assert 1 < server.peak <= 8 and server.count == 80


async def test_a_torn_verdict_is_asked_for_again(folder):
    write(folder, *samples(2))
    async with FakeServer(YES) as server:
        await run(folder, server, n_votes=1)
        text = (folder / "verdicts.jsonl").read_text()
        (folder / "verdicts.jsonl").write_text(text[:-20])
        await run(folder, server, n_votes=1)
        await run(folder, server, n_votes=1)
    assert server.count == 3 and len(lines(folder / "verdicts.jsonl")) == 2


async def test_two_runs_at_once_do_not_mix(folder):
    write(folder, *samples(1))
    refused = asyncio.Event()

    async def answer() -> str:
        await refused.wait()
        return YES

    async with FakeServer(lambda *_: answer()) as server:
        first = asyncio.create_task(run(folder, server, n_votes=1))
        while not server.active:
            await asyncio.sleep(0.01)
        with pytest.raises(DiskError, match="another process is writing"):
            await run(folder, server, n_votes=1)
        refused.set()
        await first
    assert server.count == 1


async def test_unreadable_needs_stop_with_the_row_named_and_keep_the_verdicts(folder):
    write(folder, *samples(3), sample("q9", needs="{"))
    async with FakeServer(YES) as server:
        with pytest.raises(DataError, match="row q9/0: field 'needs'"):
            await run(folder, server, n_votes=1, concurrency=1)
    assert len(lines(folder / "verdicts.jsonl")) == 3


async def test_the_teacher_judges_by_default(folder, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "secret")
    write(folder, *samples(1))
    async with FakeServer(Reply(YES, usage=(1_000_000, 0)), key="secret", model="big") as server:
        teacher = {"base_url": server.url, "model": "big", "api_key_env": "TEACHER_KEY", "budget": {"price_prompt": 2}}
        settings = load_settings({"teacher": teacher, "judge": {"n_votes": 2}})
        funnel = await asyncio.to_thread(select, folder, settings)
    assert funnel.judge == "the teacher, big" and server.count == 2
    assert lines(folder / "verdicts.jsonl")[0]["cost"] == 4.0


def test_who_judges():
    given = load_settings({"judge": {"n_votes": 5}})
    endpoint, scripted = TeacherSettings(**AT, concurrency=7), TeacherSettings(backend="scripted")
    own = load_settings({"judge": {"backend": "endpoint", "base_url": "http://judge/v1", "model": "j"}})
    teacher = choose_judge(given, endpoint).settings
    assert (teacher.backend, teacher.model, teacher.base_urls) == ("endpoint", "big", ("http://teacher/v1",))
    assert (teacher.n_votes, teacher.concurrency, teacher.max_tokens) == (5, 7, 512)
    assert choose_judge(given, scripted).name == "the rows' needs (the teacher is scripted)"
    assert choose_judge(own, endpoint).name == "j (rltr.judge)"
    assert choose_judge(own, endpoint, "teacher").name == "the teacher, big"
    assert choose_judge(own, scripted, "teacher").settings.backend == "checklist"
    assert choose_judge(given, endpoint, "settings").name == "the rows' needs"


def test_nothing_says_who_judges():
    with pytest.raises(ConfigError, match="which endpoint the teacher is.*judge.backend=endpoint"):
        choose_judge(load_settings(None), TeacherSettings())
    named = load_settings({"judge": {"base_url": "http://judge/v1", "model": "j"}})
    with pytest.raises(ConfigError, match="the backend is checklist. Fix: add judge.backend=endpoint"):
        choose_judge(named, TeacherSettings(**AT))


def test_the_teacher_comes_from_the_run_unless_it_is_given():
    settings, given = load_settings(None), load_settings({"teacher": {**AT, "model": "other"}})
    assert teacher_of({"teacher": AT}, settings).model == "big"
    assert teacher_of({"teacher": AT}, given).model == "other"
    priced = load_settings({"teacher": {"budget": {"price_prompt": 3}}})
    assert teacher_of({"teacher": AT}, priced).base_urls == ("http://teacher/v1",)
    assert teacher_of({"teacher": AT}, priced).budget.price_prompt == 3
    assert teacher_of({"depends_on": {"teacher.backend": "scripted"}}, settings).backend == "scripted"
    assert teacher_of({}, settings) == TeacherSettings()
