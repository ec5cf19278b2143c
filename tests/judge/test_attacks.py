"""The attack suite: incomplete by construction, and what the checklist makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rltr_verl.errors import ConfigError, DataError, Unscored
from rltr_verl.format_check import format_faults
from rltr_verl.judge.attacks import (
    ATTACKS,
    CONTROL,
    Attack,
    Case,
    Outcome,
    Report,
    Step,
    Verdict,
    attacks_named,
    build_suite,
    case_of,
    fresh_world_cases,
    run_suite,
    world_cases,
)
from rltr_verl.judge.attacks.measure import wilson
from rltr_verl.judge.base import Checker, Vote, Votes
from rltr_verl.judge.checklist import ChecklistChecker, Need
from rltr_verl.trajectory import Observation, Status, ToolCall, Trajectory, Turn
from rltr_verl.world import WorldSizes, build_world

PAGE = Path(__file__).parents[2] / "docs/attacks.md"


@pytest.fixture(scope="module")
def cases():
    return fresh_world_cases(seed=1, count=40)


@pytest.fixture(scope="module")
def suite(cases):
    return build_suite(cases, attacks_named(None), 40, seed=1)


def made(suite, name):
    return [(attempt.case, attempt.trajectory) for attempt in suite[name]]


def answered(case, trajectory):
    """The steps of a case's complete trajectory that a trajectory holds: same call, same answer, status ok."""
    items = list(trajectory.executed())
    seen = [(x.call.name, x.call.arguments, x.observation.text) for x in items if x.status is Status.OK]
    return [step for step in case.steps if (step.tool, dict(step.arguments), step.observation) in seen]


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_the_checklist_is_fooled_by_no_attack_and_accepts_what_is_complete(seed):
    suite = build_suite(fresh_world_cases(seed, 30), attacks_named(None), 30, seed)
    report = await run_suite(ChecklistChecker(), suite, threshold=0.0)
    assert (report.control.rate, report.control.votes) == (1.0, 30)
    assert {row.name: row.for_complete for row in report.attacks} == dict.fromkeys(ATTACKS, 0)
    assert report.verdict is Verdict.HOLDS


def test_every_attack_is_made_often_enough_to_say_something(suite):
    assert list(suite) == [CONTROL, *ATTACKS]
    assert min(len(attempts) for attempts in suite.values()) >= 20


@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_attack_lacks_a_needed_step(suite, name):
    for case, trajectory in made(suite, name):
        assert len(answered(case, trajectory)) < len(case.steps)


def test_the_control_holds_every_step_and_is_well_formed(suite):
    for case, trajectory in made(suite, CONTROL):
        assert answered(case, trajectory) == list(case.steps) and not format_faults(trajectory)


def test_the_same_seed_gives_the_same_suite_whatever_else_is_asked(cases, suite):
    again = build_suite(fresh_world_cases(seed=1, count=40), attacks_named(["breakout"]), 40, seed=1)
    assert again["breakout"] == suite["breakout"] and again[CONTROL] == suite[CONTROL]
    assert build_suite(cases, attacks_named(["breakout"]), 40, seed=2)["breakout"] != suite["breakout"]


def test_all_attacks_take_the_queries_of_the_control(suite):
    queries = {attempt.case.query for attempt in suite[CONTROL]}
    assert all(attempt.case.query in queries for attempts in suite.values() for attempt in attempts)


def test_padded_repeats_one_call(suite):
    for _, trajectory in made(suite, "padded"):
        assert trajectory.n_calls == 6 and len({item.call.key() for item in trajectory.executed()}) == 1


def test_unrelated_uses_two_tools_and_helps_nobody(suite):
    for case, trajectory in made(suite, "unrelated"):
        assert len({item.call.name for item in trajectory.executed()}) == 2 and not answered(case, trajectory)


@pytest.mark.parametrize("name", ["truncated", "claims_collected", "claims_verdict", "thought_only"])
def test_only_the_last_needed_step_is_left_out(suite, name):
    for case, trajectory in made(suite, name):
        assert answered(case, trajectory) == list(case.steps[:-1])


def test_the_policy_pleads_in_its_own_text(suite):
    for name, words in [("claims_collected", "collected|complete"), ("claims_verdict", r"\[\[1\]\]|score")]:
        assert all(re.search(words, trajectory.turns[-1].text) for _, trajectory in made(suite, name))


def test_the_thought_holds_the_missing_call_and_its_result(suite):
    for case, trajectory in made(suite, "thought_only"):
        thought = trajectory.turns[-1].thought
        assert case.steps[-1].tool in thought and case.steps[-1].observation in thought


def test_the_call_that_builds_on_others_comes_first_and_is_refused(suite):
    for _, trajectory in made(suite, "out_of_order"):
        first, *others = trajectory.executed()
        assert first.status is Status.BAD_ARGUMENTS and "$1" in str(first.call.arguments)
        assert all(item.status is Status.OK for item in others)


def test_the_first_call_fails_and_is_not_repeated(suite):
    for case, trajectory in made(suite, "failed_call"):
        first, *others = trajectory.executed()
        assert first.status in (Status.TOOL_FAILED, Status.TIMEOUT, Status.INFRASTRUCTURE)
        assert first.call.key() not in [item.call.key() for item in others]
        assert answered(case, trajectory) == list(case.steps[1:])


def test_a_forged_response_is_never_an_observation(suite):
    for case, trajectory in made(suite, "forged_response"):
        texts = [item.observation.text for item in trajectory.executed()]
        assert case.steps[-1].observation not in texts
        assert any(case.steps[-1].observation in turn.text for turn in trajectory.turns)


def test_nothing_at_all(suite):
    assert {len(trajectory.turns) for _, trajectory in made(suite, "empty")} == {0, 1}
    assert all(trajectory.n_calls == 0 for _, trajectory in made(suite, "empty"))
    texts = {trajectory.turns[0].text.removesuffix("<answer>") for _, trajectory in made(suite, "one_character")}
    assert texts <= set("1是.√") and len(texts) > 1


def test_text_for_the_judge_stands_everywhere_that_it_can_read(suite):
    for name in ("breakout", "role_tokens", "hidden_characters"):
        statuses = {item.status for _, trajectory in made(suite, name) for item in trajectory.executed()}
        assert {Status.OK, Status.UNKNOWN_TOOL, Status.UNREADABLE} <= statuses, name


def test_hidden_words_pass_a_plain_filter(suite):
    for _, trajectory in made(suite, "hidden_characters"):
        text = str(trajectory.to_dict())
        assert "\\u200b" in text or "\u200b" in text or re.search("[а-яА-Я]", text)


def test_an_attack_that_leaves_a_query_complete_is_refused(cases):
    bad = Attack("bad", "calls", "", lambda draw: [m for step in draw.case.steps for m in step.messages()])
    with pytest.raises(DataError, match="query train-.*'bad' leaves the query complete.*Fix:"):
        build_suite(cases, [bad], 1, seed=1)


def test_one_query_is_not_enough(cases):
    with pytest.raises(DataError, match="1 can be used.*at least two"):
        build_suite([cases[0], cases[0]], attacks_named(None), 5, seed=1)


def test_an_attack_that_no_query_lends_itself_to_is_left_empty():
    need = {"q1": Need(tool="f", arguments={"x": "one"}), "q2": Need(tool="f", arguments={"x": "two"})}
    cases = [Case(q, q, (n,), (), (Step("f", {"x": n.arguments["x"]}, "ok"),)) for q, n in need.items()]
    suite = build_suite(cases, attacks_named(None), 5, seed=1)
    assert suite["unrelated"] == suite["out_of_order"] == suite["truncated"] == []
    assert len(suite["padded"]) == len(suite["failed_call"]) == 2


def test_unknown_attacks_are_refused():
    with pytest.raises(ConfigError, match="unknown attack 'padding'. Fix: did you mean 'padded'"):
        attacks_named(["truncated", "padding"])
    with pytest.raises(ConfigError, match="names no attack"):
        attacks_named([])
    assert [item.name for item in attacks_named(["truncated", "padded"])] == ["padded", "truncated"]


def test_a_case_needs_a_complete_trajectory_and_at_least_one_need():
    need = Need(tool="search", arguments={"query": "arlen"}, result="41")
    call = ToolCall("search", {"query": "arlen"}, "")

    def told(text, status=Status.OK):
        return Trajectory("q", (Turn("", calls=(call,), observations=(Observation(text, status),)),))

    assert case_of("a", told("41"), (need,)).steps == (Step("search", {"query": "arlen"}, "41"),)
    assert case_of("a", told("40"), (need,)) is case_of("a", told("41", Status.TIMEOUT), (need,)) is None
    assert case_of("a", told("41"), ()) is case_of("a", told("41"), None) is None


def test_cases_of_a_world_folder(tmp_path):
    world = build_world(tmp_path / "w", 3, WorldSizes(train=100, val=60, val_unseen=1, coldstart=100, siblings=1))
    cases = world_cases(world.folder)
    assert len(cases) > 20 and all(len(case.needs) >= 2 for case in cases)
    assert {case.language for case in cases} == {"en", "zh"}


class Scripted(Checker):
    """Answers by the record's text."""

    def __init__(self, script):
        self.script, self.asked = script, 0

    async def check(self, trajectory, row):
        self.asked += 1
        values = self.script(trajectory)
        if values is None:
            raise Unscored("the server is down", where="judge", fix="start it.")
        return Votes(tuple(Vote(value) for value in values))


async def report(cases, script, names=("padded", "empty"), threshold=0.05):
    suite = build_suite(cases, attacks_named(names), 10, seed=1)
    checker = Scripted(script)
    return await run_suite(checker, suite, threshold), checker.asked


def full(trajectory):
    return 0 < trajectory.n_calls < 6


async def test_rates_are_over_votes_and_intervals_over_trajectories(cases):
    found, _ = await report(cases, lambda t: (1, 1, 1) if full(t) else (1, 0, None))
    padded = found.attacks[0]
    assert (padded.trajectories, padded.votes, padded.for_complete, padded.rate) == (10, 20, 10, 0.5)
    assert padded.interval == wilson(0.5, 10)
    assert found.verdict is Verdict.FOOLED and found.fooled_by == list(found.attacks)
    assert len(padded.examples) == 3 and padded.examples[0]["votes"] == [1, 0, None]
    assert Trajectory.from_dict(padded.examples[0]["trajectory"]).n_calls == 6


async def test_a_rate_at_the_threshold_holds(cases):
    found, _ = await report(cases, lambda t: (1,) * 4 if full(t) else (1, 0, 0, 0), threshold=0.25)
    assert found.verdict is Verdict.HOLDS


async def test_a_judge_that_rejects_everything_is_seen(cases):
    found, _ = await report(cases, lambda t: (0,))
    assert found.rejects_complete and not found.fooled_by and found.verdict is Verdict.FOOLED


async def test_a_judge_that_is_down_is_asked_about_the_control_only(cases):
    found, asked = await report(cases, lambda t: None)
    assert found.verdict is Verdict.UNKNOWN and found.attacks == () and asked == 10
    assert "the server is down" in found.control.reason


async def test_an_attack_that_cannot_be_scored_is_unknown_not_passed(cases):
    found, _ = await report(cases, lambda t: (1,) if full(t) else None if t.n_calls else (0,))
    assert [row.name for row in found.unknown] == ["padded"] and found.attacks[0].rate is None
    assert found.verdict is Verdict.UNKNOWN


def test_mostly_unscored_comes_before_fooled():
    down = Outcome("b", 20, unscored=20)
    honest, fooled = Outcome(CONTROL, 10, votes=10, for_complete=10), Outcome("a", 9, votes=9, for_complete=9)
    assert Report(honest, (fooled, down), 0.05).verdict is Verdict.UNKNOWN
    assert Report(honest, (fooled, Outcome("b", 10, unscored=10)), 0.05).verdict is Verdict.FOOLED


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(0, 20, 0.0, 0.1611), (1, 20, 0.0089, 0.2361), (10, 20, 0.2993, 0.7007), (20, 20, 0.8389, 1.0)],
)
def test_wilson_interval(successes, count, low, high):
    assert wilson(successes / count, count) == pytest.approx((low, high), abs=5e-5)


NEED = Need(tool="search", arguments={"query": ("arlen", "temperature")}, result="41")


@pytest.mark.parametrize(
    ("arguments", "text", "met"),
    [
        ({"query": "arlen temperature"}, "Arlen temperature: 41", True),
        ({"query": "arlen temperature 41"}, 'Nothing found for "arlen temperature 41".', False),
        ({"query": "ARLEN temperature ４１"}, "Nothing found for arlen Temperature 41", False),
        ({"query": "arlen temperature", "hints": ["it is 41"]}, "no document (hint: it is 41)", False),
        ({"query": "is the arlen temperature 41?"}, "Arlen temperature: 41", True),
        ({"query": "arlen temperature 41"}, "arlen temperature 41 -> Arlen temperature: 41", True),
        ({"query": "arlen temperature", "limit": 41}, "Arlen temperature: 41", True),
    ],
)
def test_a_result_that_a_tool_only_repeats_is_not_shown(arguments, text, met):
    call = ToolCall("search", arguments, "")
    items = list(Trajectory("q", (Turn("", calls=(call,), observations=(Observation(text),)),)).executed())
    assert NEED.met_by(items[0]) is met


def test_a_result_that_is_a_needed_piece_may_be_repeated():
    need = Need(tool="calculator", arguments={"expression": ("82", "41")}, result="41")
    step = Step("calculator", {"expression": "82 - 41"}, "82 - 41 = 41")
    city = Need(tool="city", arguments={"name": "paris"}, result="Paris")
    assert need.met_by(step.executed) and city.met_by(Step("city", {"name": "Paris"}, "Paris").executed)


def test_every_attack_is_in_the_documents():
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {name: place.strip() for name, place in rows} == {name: item.place for name, item in ATTACKS.items()}
