"""Scripted policies, acted out in the real planner loop with the real tools and scored by the shipped rewards."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean

import pytest

from rltr_verl.scoring import Scorer
from rltr_verl.tooling import schemas
from rltr_verl.trajectory import Status, Trajectory
from rltr_verl.world.build import load_world_tools
from rltr_verl.world.policies import POLICIES, Forger, Lazy, Oracle, RandomCaller, Spammer, Teacher, play


@pytest.fixture(scope="module")
def scored(rows, shipped, act_out):
    """``await scored(policy, *overrides)``: the totals by kind over val, under a shipped reward configuration."""

    async def run(policy, *overrides):
        scorer = Scorer(shipped(*overrides))
        totals = defaultdict(list)
        for row in rows("val"):
            info = row["extra_info"]
            rollout = await act_out(policy, row)
            result = await scorer.score(Trajectory(info["query"], tuple(rollout.turns), end=rollout.end), info)
            totals[info["kind"]].append(result.total)
        return totals

    return run


def mean(totals):
    return fmean(value for values in totals.values() for value in values)


@pytest.mark.parametrize("credit", ["all", "fraction"])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_rewards_rank_the_policies(scored, credit, seed):
    """A reward under which laziness, spam or forgery pays would train just that."""
    override = f"rltr.judge.credit={credit}"
    oracle, lazy, spammer, forger = [await scored(policy(seed), override) for policy in (Oracle, Lazy, Spammer, Forger)]
    assert mean(oracle) > mean(lazy) > mean(spammer)
    assert {value for values in oracle.values() for value in values} == {1.0}
    for kind in lazy:
        assert fmean(forger[kind]) <= fmean(lazy[kind]), kind
    assert mean(forger) < mean(lazy)


async def test_lazy_completes_just_what_one_call_can(scored):
    totals = await scored(Lazy())
    complete = {kind for kind, values in totals.items() if set(values) == {1.0}}
    assert complete == {"none", "calc", "look"}
    assert all(set(values) == {0.0} for kind, values in totals.items() if kind not in complete)


async def test_oracle_ends_in_order_with_successful_calls(rows, act_out):
    for row in rows("val"):
        rollout = await act_out(Oracle(), row)
        statuses = [item.status for turn in rollout.turns for item in turn.observations]
        assert rollout.end == "answer" and set(statuses) <= {Status.OK}


async def test_random_policy_errs_in_several_ways(rows, act_out):
    rollouts = [await act_out(RandomCaller(seed=3), row) for row in rows("val")]
    statuses = {item.status for rollout in rollouts for turn in rollout.turns for item in turn.observations}
    assert {Status.OK, Status.UNREADABLE, Status.BAD_ARGUMENTS} <= statuses


def test_teacher_goes_on_as_often_as_said(rows):
    teacher = Teacher(seed=5, second=0.4, later=0.7)
    multi = [row for row in rows("train") if row["extra_info"]["kind"] in ("diff", "sum", "rank", "total")]
    after_one = fmean(teacher.act(row, ["41"]) != "<answer>" for row in multi)
    after_two = fmean(teacher.act(row, ["41", "17"]) != "<answer>" for row in multi)
    assert len(multi) > 100
    assert abs(after_one - 0.4) < 0.12 and abs(after_two - 0.7) < 0.12


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_is_deterministic_whatever_the_order(rows, name):
    sample = rows("val")[:20]
    policy = POLICIES[name](seed=7)
    forward = [policy.act(row, ["x"]) for row in sample]
    backward = [POLICIES[name](seed=7).act(row, ["x"]) for row in reversed(sample)]
    assert forward == backward[::-1]
    assert POLICIES[name].name == name


async def test_play_gives_the_same_conversation_as_the_planner_loop(rows, world, act_out):
    tools, compared = load_world_tools(world.corpus), 0
    for row in rows("val")[:30]:
        for policy in (Oracle(), Teacher(2), RandomCaller(2), Spammer()):
            messages = play(policy, row, {name: tool.call for name, tool in tools.items()}, max_turns=6)
            told = Trajectory.from_messages(messages, tools=schemas(tools))
            rollout = await act_out(policy, row)
            if rollout.end != "answer":
                continue  # at a limit of turns or tokens the loop runs no further call
            assert [turn.calls for turn in told.turns] == [turn.calls for turn in rollout.turns]
            ok = [item.text for turn in rollout.turns for item in turn.observations if item.status is Status.OK]
            seen = [message["content"] for message in messages if message["role"] == "tool"]
            assert [text for text in seen if not text.startswith("Error")] == ok
            compared += 1
    assert compared > 100
