"""The simulation of judge outages: verl's advantages are looked up rightly, and small runs give the expected order."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "outage_bias.py"
BATCHES = 400


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("outage_bias", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


bias = _load()
SCENARIOS = {scenario.name: scenario for scenario in bias.SCENARIOS}
POLICIES = {policy.name: policy for policy in (*bias.POLICIES, bias.DROP_WITH_LONE)}


@pytest.fixture(scope="module")
def grpo():
    return bias.group_estimator("grpo")


@pytest.fixture(scope="module")
def figures(grpo):
    reference = bias.Reference.of(grpo, BATCHES)
    return lambda scenario, policy, share=0.3: reference.compare(SCENARIOS[scenario], POLICIES[policy], share)


def test_the_table_holds_what_verl_computes(grpo):
    rng = np.random.default_rng(3)
    codes = rng.integers(len(bias.VALUES), size=(1, 50, bias.GROUP))
    kept = rng.random(codes.shape) < rng.random((1, 50, 1))
    groups = np.repeat(np.arange(50), bias.GROUP)[kept.ravel()]
    expected = bias.verl_advantages("grpo", bias.VALUES[codes[kept]], groups)
    assert {1, 2, 8} <= set(kept.sum(-1).ravel())
    np.testing.assert_allclose(grpo(codes, kept)[kept], expected, atol=1e-3)


def test_a_lone_member_gets_its_raw_total_from_verl_and_is_left_out_by_drop(grpo):
    codes = np.full((1, 1, 8), 8)
    kept = np.arange(8)[None, None] == 2
    assert grpo(codes, kept)[kept] == pytest.approx(bias.VALUES[8])
    rollouts = bias.sample(np.random.default_rng(0), bias.START[None])
    hit = np.ones(rollouts.plans.shape, bool)
    hit[..., 0] = False
    assert bias.treat(POLICIES["drop, lone kept"], rollouts, hit)[1].sum() == 8
    assert bias.treat(POLICIES["drop"], rollouts, hit)[1].sum() == 0


@pytest.mark.parametrize("policy", [policy.name for policy in bias.POLICIES if policy.name != "strict drop"])
def test_without_outage_nothing_changes(figures, policy):
    found = figures("any trajectory", policy, 0.0)
    assert found.bias == pytest.approx(0, abs=1e-6) and found.worth == pytest.approx(100)


def test_outages_hit_as_many_as_asked_and_long_plans_more_often():
    rollouts = bias.sample(np.random.default_rng(0), np.tile(bias.START, (BATCHES, 1)))
    judged = bias.JUDGED[rollouts.plans]
    for name in ("judged ones", "by calls", "4+ calls only"):
        hit = rollouts.hit(SCENARIOS[name], 0.3)
        assert hit[judged].mean() == pytest.approx(0.3, abs=0.02) and not hit[~judged].any()
    rates = SCENARIOS["by calls"].rates(0.3)
    assert rates[bias.WANDERING] > rates[bias.COMPLETE] > rates[2] > 0
    whole = rollouts.hit(SCENARIOS["whole batches"], 0.3).reshape(BATCHES, -1)
    assert (whole.all(-1) | ~whole.any(-1)).all() and 0 < whole.mean() < 1


def test_drop_is_less_biased_than_either_fill_where_any_trajectory_is_hit(figures):
    drop, zero, one = (figures("any trajectory", name) for name in ("drop", "0-fill", "1-fill"))
    assert drop.bias + 3 * drop.errors[0] < min(zero.bias, one.bias)
    assert drop.cosine > max(zero.cosine, one.cosine)


def test_drop_under_rloo_is_unbiased_where_any_trajectory_is_hit():
    reference = bias.Reference.of(bias.group_estimator("rloo"), BATCHES)
    found = reference.compare(SCENARIOS["any trajectory"], POLICIES["drop"], 0.3)
    assert found.cosine > 0.999 and found.bias < 5


@pytest.mark.parametrize("scenario", ["by calls", "4+ calls only"])
def test_drop_is_biased_too_where_long_plans_are_hit_but_less_than_0_fill(figures, scenario):
    drop, zero = figures(scenario, "drop"), figures(scenario, "0-fill")
    assert drop.bias > 10 and zero.bias > 1.2 * drop.bias


def test_leftovers_of_a_hit_batch_mislead_unless_a_verdict_is_needed(figures):
    drop, strict, zero = (figures("batches, judged", name) for name in ("drop", "strict drop", "0-fill"))
    assert drop.bias > zero.bias > 10 * strict.bias
    assert strict.cosine > 0.999


def test_1_fill_teaches_the_plan_that_the_judge_cannot_read(grpo):
    found = bias.compare_overflow(grpo, runs=4, steps=200)
    wandering = {policy: plans[:, bias.WANDERING].mean() for (calls, policy), plans in found.items() if calls == 8}
    complete = {policy: plans[:, bias.COMPLETE].mean() for (calls, policy), plans in found.items() if calls == 4}
    assert wandering["1-fill"] > 0.3 and max(wandering["0-fill"], wandering["drop"]) < 0.1
    assert max(complete["0-fill"], complete["drop"]) < bias.START[bias.COMPLETE]


def test_the_script_prints_draws_and_writes(tmp_path, monkeypatch, capsys):
    png, figures = tmp_path / "a.png", tmp_path / "a.json"
    arguments = ["--batches", "40", "--runs", "2", "--steps", "2", "--plot", str(png), "--json", str(figures)]
    monkeypatch.setattr(sys, "argv", [str(FILE), *arguments])
    bias.main()
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*SCENARIOS, *POLICIES, "REINFORCE++"))
    found = json.loads(figures.read_text())
    assert len(found["grpo"]) == len(bias.SCENARIOS) * len(bias.POLICIES) * len(bias.SHARES)
    assert png.read_bytes().startswith(b"\x89PNG")
