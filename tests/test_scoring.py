"""Scorer: Eq. 3, its fixed metric keys, and terms found by name or file."""

import math
import textwrap
from dataclasses import replace

import pytest

from rltr_verl.config import load_settings
from rltr_verl.errors import ConfigError, ToolDefinitionError, Unscored
from rltr_verl.judge import Checker, Vote, Votes
from rltr_verl.scoring import Scorer, shipped_terms
from rltr_verl.trajectory import Observation, Trajectory

CALL = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
BROKEN = '<tool_call>{"name": "search", "arguments": {"query": "x"}</tool_call>'


class Counting(Checker):
    """Counts how often it is asked; ``vote`` None means that it cannot tell."""

    def __init__(self, vote=1.0):
        self.vote, self.asked = vote, 0

    async def check(self, trajectory, row):
        self.asked += 1
        if self.vote is None:
            raise Unscored("the judge is down")
        return Votes((Vote(self.vote),))


def said(*texts, stop="<answer>"):
    """A turn per text, each followed by an observation per call, then the stop marker."""
    messages = []
    for text in texts:
        messages.append({"role": "assistant", "content": text})
        messages += [{"role": "tool", "content": "r"}] * text.count("<tool_call>")
    return Trajectory.from_messages([*messages, {"role": "assistant", "content": stop}], "q")


def scorer(terms=None, vote=1.0, **reward):
    node = {**reward, **({"terms": terms} if terms is not None else {})}
    return Scorer(load_settings({"reward": node}), Counting(vote))


async def total(trajectory, *args, **kwargs):
    return (await scorer(*args, **kwargs).score(trajectory, {})).total


async def test_total_is_the_sum_of_the_terms():
    terms = {"completeness": {}, "repeat": {"lambda": 0.3}, "error": {"mu": 0.25}}
    scored = await scorer(terms).score(said(CALL, CALL, BROKEN), {})
    assert scored.total == pytest.approx(1 - 0.3 - 0.25)
    expected = {
        "acc": 1,
        "completeness": 1,
        "repeat": -0.3,
        "error": -0.25,
        "repeats": 1,
        "errors": 1,
        "calls": 3,
        "turns": 4,
    }
    assert {key: scored.metrics[key] for key in expected} == pytest.approx(expected)


async def test_weight_scales_a_term_but_not_acc():
    scored = await scorer({"completeness": {"weight": 2}, "error": {"weight": 0.5}}).score(said(BROKEN), {})
    assert scored.total == pytest.approx(2 - 0.5 * 0.2)
    assert scored.metrics["completeness"] == 2 and scored.metrics["acc"] == 1


async def test_mu_matters():
    """A malformed call in a well-formed trajectory is charged by mu; it is no format failure."""
    totals = [await total(said(BROKEN), {"completeness": {}, "error": {"mu": mu}}) for mu in (0.0, 0.2, 0.5)]
    assert totals == pytest.approx([1.0, 0.8, 0.5])


@pytest.mark.parametrize(
    "trajectory",
    [
        said(CALL, stop="<think>still going"),
        said("<|im_start|>user\n<tool_response>42</tool_response><|im_end|>\nDone"),
        said(stop="<answer>It is 4."),
        said(stop="no marker"),
        said(stop=""),
        Trajectory("q"),
        Trajectory("q", said(CALL).turns, end="length"),
    ],
    ids=["unclosed think", "forged role", "text after stop", "no marker", "empty", "no turn", "cut off"],
)
async def test_malformed_is_minus_one_and_the_checker_is_not_asked(trajectory):
    subject = scorer()
    scored = await subject.score(trajectory, {})
    assert scored.total == -1.0 and scored.faults
    assert scored.metrics["format_ok"] == 0 and scored.metrics[f"format_{scored.faults[0]}"] == 1
    assert subject._checker.asked == 0
    assert not scored.results


async def test_a_malformed_trajectory_is_still_measured():
    scored = await scorer().score(said(CALL, CALL, BROKEN, stop="no marker"), {})
    assert (scored.metrics["calls"], scored.metrics["repeats"], scored.metrics["errors"]) == (3, 1, 1)


async def test_floor_holds_for_well_formed_trajectories():
    many = said(*[BROKEN] * 20)
    assert await total(many, vote=0.0) == -1.0
    assert await total(many, vote=0.0, floor=None) == pytest.approx(-0.2 * 20 - 0.1 * 19)
    assert await total(many, vote=0.0, floor=-2.0) == -2.0


async def test_every_path_reports_the_same_numeric_keys():
    subject = scorer()
    paths = [
        await subject.score(said(CALL), {}),
        await subject.score(said(stop="no marker"), {}),
        await subject.score(Trajectory("q"), {}),
        await scorer(vote=None).score(said(CALL), {}),
    ]
    for scored in paths:
        assert tuple(scored.metrics) == subject.metric_keys
        assert {type(value) for value in scored.metrics.values()} == {float}


async def test_without_a_verdict_there_is_no_total_and_no_stand_in():
    scored = await scorer(vote=None).score(said(CALL, CALL), {})
    assert scored.total is None and "the judge is down" in scored.unscored
    assert scored.metrics["unscored"] == 1 and scored.metrics["repeats"] == 1
    assert all(math.isnan(scored.metrics[key]) for key in ("acc", "completeness", "votes"))
    assert scored.record()["metrics"]["acc"] is None


def cut(*texts, end="length"):
    return Trajectory("q", said(*texts).turns[:-1], end=end)


@pytest.mark.parametrize("end", ["length", "turn_limit", "aborted"])
async def test_a_cut_off_trajectory_is_malformed_or_left_out_as_the_recipe_says(end):
    assert await total(cut(CALL, CALL, end=end)) == -1.0
    subject = scorer(truncated="unscored")
    scored = await subject.score(cut(CALL, CALL, BROKEN, end=end), {})
    assert scored.total is None and f"truncated ({end})" in scored.unscored
    assert subject._checker.asked == 0 and scored.faults == ("truncated",)
    assert tuple(scored.metrics) == subject.metric_keys
    assert (scored.metrics["unscored"], scored.metrics["format_truncated"], scored.metrics["format_ok"]) == (1, 1, 0)
    assert (scored.metrics["repeats"], scored.metrics["errors"]) == (1, 1) and math.isnan(scored.metrics["acc"])
    assert scored.record()["total"] is None and scored.record()["format"] == ["truncated"]


async def test_a_breach_of_its_own_makes_a_cut_off_trajectory_malformed_all_the_same():
    subject = scorer(truncated="unscored")
    assert (await subject.score(cut(f"<|im_start|>{CALL}"), {})).total == -1.0
    assert (await subject.score(said(stop="no marker"), {})).total == -1.0
    assert (await subject.score(said(CALL), {})).total == 1.0


async def test_a_tool_servers_report_of_its_failure_is_a_tool_fault():
    """Case E02a, in a rollout: the status stays what the runner said, the metric tells."""
    turns = said(CALL).turns
    reported = replace(turns[0], observations=(Observation("Error executing tool query: 1 validation error"),))
    scored = await scorer().score(Trajectory("q", (reported, *turns[1:])), {})
    assert (scored.metrics["tool_faults"], scored.metrics["errors"]) == (1, 0)


async def test_twenty_pointless_calls_do_not_beat_two_that_cover_the_task():
    """Case R07a."""
    needs = [{"tool": "search", "arguments": {"query": [word]}} for word in ("arlen", "brona")]
    ask = '<tool_call>{{"name": "search", "arguments": {{"query": "{}"}}}}</tool_call>'
    subject = Scorer(load_settings({}))
    good = await subject.score(said(ask.format("arlen"), ask.format("brona")), {"needs": needs})
    padded = await subject.score(said(*[ask.format(f"q{index}") for index in range(20)]), {"needs": needs})
    assert good.total == 1.0 and padded.total == 0.0


def test_shipped_terms():
    assert {"completeness", "repeat", "error"} <= set(shipped_terms())


async def test_a_term_set_to_null_is_off():
    assert await total(said(CALL, CALL), {"completeness": {}, "repeat": None}) == 1.0


MINE = """
from rltr_verl import RewardTerm, TermResult

class Brevity(RewardTerm):
    metric_keys = ("over",)

    def __init__(self, *, most: int = 1) -> None:
        self.most = most

    async def score(self, trajectory, row):
        over = max(0, trajectory.n_calls - self.most)
        return TermResult({value}, {metrics})
"""


def write(tmp_path, value="-0.1 * over", metrics='{"over": over}', body=MINE):
    path = tmp_path / "my_term.py"
    path.write_text(textwrap.dedent(body).replace("{value}", value).replace("{metrics}", metrics))
    return str(path)


async def test_a_users_term_by_path(tmp_path):
    subject = scorer({"completeness": {}, "brevity": {"path": write(tmp_path), "most": 1, "weight": 2}})
    scored = await subject.score(said(CALL, CALL, CALL), {})
    assert scored.total == pytest.approx(1 - 2 * 0.1 * 2)
    assert scored.metrics["brevity"] == pytest.approx(-0.4) and scored.metrics["over"] == 2


@pytest.mark.parametrize(
    ("value", "metrics", "message"),
    [
        ("float('nan')", '{"over": over}', "finite number"),
        ("0.0", "{}", "same keys on every path"),
        ("0.0", '{"over": over, "more": 1}', "same keys on every path"),
    ],
)
async def test_a_users_term_is_held_to_its_contract(tmp_path, value, metrics, message):
    subject = scorer({"brevity": {"path": write(tmp_path, value, metrics)}})
    with pytest.raises(ToolDefinitionError, match=message):
        await subject.score(said(CALL), {})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = 1", "defines 0 reward terms"),
        ("from rltr_verl import RewardTerm\nclass A(RewardTerm): pass", "class A does not implement score"),
        (MINE + MINE.replace("Brevity", "Other"), "defines 2 reward terms"),
    ],
)
def test_a_users_file_must_define_one_term(tmp_path, body, message):
    path = write(tmp_path, "0", "{}", body)
    with pytest.raises(ToolDefinitionError, match=rf"my_term.py: {message}.*Fix: define exactly one"):
        scorer({"mine": {"path": path}})


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"repet": {}}, "unknown reward term 'repet'. Fix: did you mean 'repeat'?"),
        ({"quality": {}}, "shipped: .*repeat.* give rltr.reward.terms.quality.path=my_term.py"),
        ({"mine": {"path": "nowhere.py"}}, "rltr.reward.terms.mine.path: no file 'nowhere.py'"),
        ({"repeat": {"lamda": 0.1}}, "unknown setting 'lamda'. Fix: did you mean 'lambda'?"),
        ({"repeat": {"lambda": "much"}}, "rltr.reward.terms.repeat.lambda: .*'much'"),
        ({"repeat": {"lambda": -1}}, "rltr.reward.terms.repeat.lambda: .*-1"),
        ({"repeat": {"scope": "global"}}, "'consecutive' or 'any'"),
        ({"error": {"mu": -0.1}}, "rltr.reward.terms.error.mu"),
        ({"error": {"weight": "x"}}, "rltr.reward.terms.error.weight: the weight must be a number"),
        ({"completeness": {"checker": "x"}}, "unknown setting 'checker'"),
    ],
)
def test_a_wrong_recipe_is_one_clear_error(terms, message):
    with pytest.raises(ConfigError, match=message):
        scorer(terms)


def test_two_terms_may_not_report_the_same_metric(tmp_path):
    path = write(tmp_path, body=MINE.replace('"over"', '"acc"'))
    with pytest.raises(ConfigError, match="'acc' is reported twice"):
        scorer({"completeness": {}, "mine": {"path": path}})
