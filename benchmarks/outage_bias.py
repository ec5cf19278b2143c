"""What a judge's outages do to the policy gradient: 0-fill, 1-fill and drop, with verl's own advantage code.

    python benchmarks/outage_bias.py [--batches 4000] [--runs 32] [--steps 200] [--plot FILE] [--json FILE]

A bandit: the policy is a softmax over six kinds of plan (:data:`PLANS`); the total is the mean of three votes less a
penalty, and -1 for a malformed plan. A batch is 64 trajectories in groups of one query; its gradient is the mean of
advantage times d log pi / d logits over the trajectories that are trained. Advantages come from verl. A batch with
nothing to train takes no step.

Figures compare the mean gradient of the steps taken with that of the same batches without any outage:

* bias: norm of the difference, in % of the norm without outage; cosine: of the angle between the two;
* worth: how many batches without outage one batch under outage is worth, in %. It is the squared mean along the true
  gradient over the variance, as a share of the same without outage, times the share of batches that take a step.

Standard errors are a jackknife's over 20 blocks of batches. Bias is a norm, so noise alone makes it positive.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

N_VOTES = 3
GROUP = 8
BATCH = 64
BLOCKS = 20
SHARES = (0.05, 0.1, 0.2, 0.3)
WORST = SHARES[-1]
LEARNING_RATE = 0.1
_STYLES: tuple[dict[str, Any], ...] = (  # by policy: some curves lie on one another, and all must show
    {"color": "C0"},
    {"color": "C1"},
    {"color": "C2", "linewidth": 4, "alpha": 0.5},
    {"color": "C3", "linestyle": "--"},
    {"color": "C4", "linestyle": ":", "linewidth": 2.5},
)

Array = np.ndarray
Estimator = Callable[[Array, Array], Array]
"""(codes of totals, kept) of shape (batches, groups, members) -> advantages of that shape; undefined where not kept."""


@dataclass(frozen=True)
class Plan:
    """A kind of plan: its share before training, and the chance that a vote finds it complete.

    ``judged``: whether a judge is asked at all; without a call or with a broken format it is not.
    """

    name: str
    share: float
    calls: int
    vote: float
    penalty: float = 0.0
    judged: bool = True


PLANS = (
    Plan("malformed", 0.10, calls=0, vote=0.0, judged=False),
    Plan("no call", 0.25, calls=0, vote=0.0, judged=False),
    Plan("partial", 0.30, calls=2, vote=0.2),
    Plan("complete", 0.15, calls=4, vote=0.9),
    Plan("padded", 0.10, calls=6, vote=0.9, penalty=0.2),
    Plan("wandering", 0.10, calls=8, vote=0.1),
)
MALFORMED, COMPLETE, WANDERING = 0, 3, 5
START = np.array([plan.share for plan in PLANS])
TRAINED = np.array([0.01, 0.02, 0.08, 0.80, 0.06, 0.03])
"""Shares of a policy late in training."""
VOTE = np.array([plan.vote for plan in PLANS])
_NAMES = [plan.name for plan in PLANS]
JUDGED = np.array([plan.judged for plan in PLANS])


def _totals() -> Array:
    """Total by plan and number of positive votes."""
    totals = np.arange(N_VOTES + 1) / N_VOTES - np.array([[plan.penalty] for plan in PLANS])
    totals[MALFORMED] = -1.0
    return totals.round(9)


VALUES = np.unique(_totals())
CODES = np.searchsorted(VALUES, _totals())
"""Position in ``VALUES`` of the total, by plan and number of positive votes."""


@dataclass(frozen=True)
class Scenario:
    """Which trajectories an outage hits; its share is meant over those that it can hit, under the first policy."""

    name: str
    exposure: tuple[float, ...]
    by_batch: bool = False
    judged_only: bool = True

    def rates(self, share: float) -> Array:
        """Chance of a hit by plan, in proportion to the exposure."""
        able = START * (JUDGED if self.judged_only else 1)
        return np.minimum(1.0, share * np.array(self.exposure) / np.average(self.exposure, weights=able))


def _from_calls(least: int) -> tuple[float, ...]:
    return tuple(float(plan.calls >= least) for plan in PLANS)


_ALL = (1.0,) * len(PLANS)
_JUDGED = tuple(float(plan.judged) for plan in PLANS)
SCENARIOS = (
    Scenario("any trajectory", _ALL, judged_only=False),
    Scenario("judged ones", _JUDGED),
    Scenario("by calls", tuple(float(plan.calls) for plan in PLANS)),
    Scenario("4+ calls only", _from_calls(4)),
    Scenario("whole batches", _ALL, by_batch=True, judged_only=False),
    Scenario("batches, judged", _JUDGED, by_batch=True),
)


@dataclass(frozen=True)
class Policy:
    """What is done about a trajectory without a verdict: votes are made up (``fill``), or it is left out.

    ``whole_group``: and its group with it. ``verdictless``: a group goes on if its only scored members are ones that no
    judge was asked about. ``lone``: so does a group of one.
    """

    name: str
    fill: float | None = None
    whole_group: bool = False
    verdictless: bool = True
    lone: bool = False


POLICIES = (
    Policy("0-fill", fill=0.0),
    Policy("1-fill", fill=1.0),
    Policy("drop"),
    Policy("strict drop", verdictless=False),
    Policy("drop the group", whole_group=True),
)
DROP = POLICIES[2]
DROP_WITH_LONE = Policy("drop, lone kept", lone=True)
NO_OUTAGE = Policy("no outage", lone=True)


@dataclass(frozen=True)
class Rollouts:
    """Sampled trajectories, (batches, groups, members), with the uniform numbers that decide on outages."""

    plans: Array
    votes: Array
    luck: Array
    batch_luck: Array

    def hit(self, scenario: Scenario, share: float) -> Array:
        """Which trajectories get no verdict; a larger share hits the same ones and more."""
        luck = self.batch_luck if scenario.by_batch else self.luck
        return luck < scenario.rates(share)[self.plans]


def sample(rng: np.random.Generator, probs: Array, group: int = GROUP) -> Rollouts:
    """One batch of trajectories per row of ``probs`` (batches, plans)."""
    shape = (len(probs), BATCH // group, group)
    edges = np.cumsum(probs, axis=-1)[:, None, None, :-1]
    plans = (rng.random(shape)[..., None] > edges).sum(-1)
    return Rollouts(plans, rng.binomial(N_VOTES, VOTE[plans]), rng.random(shape), rng.random((len(probs), 1, 1)))


def treat(policy: Policy, rollouts: Rollouts, hit: Array) -> tuple[Array, Array]:
    """Codes of the totals, and which trajectories are trained."""
    if policy.fill is not None:
        votes = np.where(hit, round(policy.fill * N_VOTES), rollouts.votes)
        return CODES[rollouts.plans, votes], np.ones_like(hit)
    kept = ~hit
    if policy.whole_group:
        kept &= ~hit.any(-1, keepdims=True)
    if not policy.verdictless:
        kept &= (kept & JUDGED[rollouts.plans]).any(-1, keepdims=True)
    if not policy.lone:
        kept &= kept.sum(-1, keepdims=True) > 1
    return CODES[rollouts.plans, rollouts.votes], kept


class GroupEstimator:
    """One of verl's estimators that look at one group at a time, tabulated: verl is asked once for every group that
    there can be (a multiset of at most ``GROUP`` totals), since its loop takes 20 microseconds a row."""

    _PLACES = (GROUP + 1) ** np.arange(len(VALUES))

    def __init__(self, name: str, **options: Any) -> None:
        groups = [np.array(codes) for codes in _multisets()]
        codes, index = np.concatenate(groups), np.repeat(np.arange(len(groups)), [len(codes) for codes in groups])
        keys = np.array([self._PLACES[group].sum() for group in groups])
        order = np.argsort(keys)
        by_code = np.zeros((len(groups), len(VALUES)))
        by_code[index, codes] = verl_advantages(name, VALUES[codes], index, **options)
        self._keys, self._by_code = keys[order], by_code[order]

    def __call__(self, codes: Array, kept: Array) -> Array:
        rows = np.searchsorted(self._keys, (self._PLACES[codes] * kept).sum(-1))
        return self._by_code[rows[..., None], codes]


@cache
def group_estimator(name: str, **options: Any) -> GroupEstimator:
    """The table of an estimator, made once a process."""
    return GroupEstimator(name, **options)


def _multisets() -> Iterator[tuple[int, ...]]:
    for size in range(1, GROUP + 1):
        yield from combinations_with_replacement(range(len(VALUES)), size)


def verl_advantages(name: str, totals: Array, index: Array, **options: Any) -> Array:
    """Advantages of trajectories of one token each, by verl's estimator ``name``."""
    rewards = torch.tensor(totals, dtype=torch.float32)[:, None]
    advantages, _ = get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=torch.ones_like(rewards), index=index, **options
    )
    return advantages[:, 0].numpy()


def reinforce_pp(codes: Array, kept: Array) -> Array:
    """REINFORCE++ whitens over the whole batch, so verl is asked batch by batch."""
    advantages = np.zeros(codes.shape)
    for row, mask, out in zip(codes, kept, advantages, strict=True):
        if mask.sum() > 1:
            totals = VALUES[row[mask]]
            out[mask] = verl_advantages("reinforce_plus_plus", totals, np.zeros(len(totals)), config=AlgoConfig())
    return advantages


def gradients(estimator: Estimator, codes: Array, kept: Array, plans: Array, probs: Array) -> tuple[Array, Array]:
    """Gradient with respect to the logits (batches, plans), and which batches take a step; zero where none is taken."""
    weights = np.where(kept, estimator(codes, kept), 0.0).reshape(len(plans), -1)
    cells = plans.reshape(len(plans), -1) + len(PLANS) * np.arange(len(plans))[:, None]
    pulled = np.bincount(cells.ravel(), weights.ravel(), minlength=len(plans) * len(PLANS)).reshape(len(plans), -1)
    trained = kept.sum((1, 2))
    gradient = (pulled - weights.sum(-1, keepdims=True) * probs) / np.maximum(trained, 1)[:, None]
    return gradient, trained > 0


@dataclass(frozen=True)
class Figures:
    """Bias and worth in %, cosine, each with its standard error; the share of trained trajectories alone in their
    group, in %."""

    bias: float
    cosine: float
    worth: float
    errors: tuple[float, float, float]
    lone: float


@dataclass(frozen=True)
class Reference:
    """Batches of trajectories of a policy with ``probs``, and their gradients without outage."""

    estimator: Estimator
    rollouts: Rollouts
    probs: Array
    gradient: Array

    @classmethod
    def of(cls, estimator: Estimator, batches: int, group: int = GROUP, probs: Array = START) -> Reference:
        """The same trajectories on every call."""
        rollouts = sample(np.random.default_rng(0), np.tile(probs, (batches, 1)), group)
        codes, kept = treat(NO_OUTAGE, rollouts, np.zeros(rollouts.plans.shape, bool))
        return cls(estimator, rollouts, probs, gradients(estimator, codes, kept, rollouts.plans, probs)[0])

    def compare(self, scenario: Scenario, policy: Policy, share: float) -> Figures:
        """Figures of ``policy`` under an outage."""
        codes, kept = treat(policy, self.rollouts, self.rollouts.hit(scenario, share))
        gradient, taken = gradients(self.estimator, codes, kept, self.rollouts.plans, self.probs)
        alone = (kept.sum(-1) == 1).sum() / max(kept.sum(), 1)
        return Figures(*_jackknife(_sums(self.gradient, np.ones(len(taken))), _sums(gradient, taken)), 100 * alone)


def _sums(gradient: Array, taken: Array) -> Array:
    """By block: batches that take a step, sum of squared norms, sum of gradients."""
    columns = np.column_stack([taken, (gradient**2).sum(-1), gradient])
    return np.array([block.sum(0) for block in np.array_split(columns, BLOCKS)])


def _jackknife(reference: Array, other: Array) -> tuple[float, float, float, tuple[float, float, float]]:
    all_of = _figures(reference.sum(0), other.sum(0))
    without = np.array(
        [_figures(reference.sum(0) - a, other.sum(0) - b) for a, b in zip(reference, other, strict=True)]
    )
    errors = np.sqrt((BLOCKS - 1) * without.var(0))
    return (*all_of.tolist(), tuple(errors.tolist()))


def _figures(reference: Array, other: Array) -> Array:
    """Bias, cosine, worth."""
    true, noise = _moments(reference)
    mean, other_noise = _moments(other)
    size = np.linalg.norm(true)
    along = mean @ true / size
    worth = other[0] / reference[0] * max(along, 0.0) ** 2 / other_noise / (size**2 / noise)
    return np.array([100 * np.linalg.norm(mean - true) / size, along / np.linalg.norm(mean), 100 * worth])


def _moments(sums: Array) -> tuple[Array, float]:
    """Mean gradient of a step, and the variance summed over its components."""
    mean = sums[2:] / sums[0]
    return mean, sums[1] / sums[0] - mean @ mean


def train(estimator: Estimator, scenario: Scenario, policy: Policy, share: float, steps: int, runs: int) -> Array:
    """Probability of each plan while bandits train by plain gradient ascent: (steps + 1, runs, plans)."""
    rng = np.random.default_rng(1)
    logits = np.tile(np.log(START), (runs, 1))
    curve = [np.tile(START, (runs, 1))]
    for _ in range(steps):
        rollouts = sample(rng, curve[-1])
        codes, kept = treat(policy, rollouts, rollouts.hit(scenario, share))
        logits += LEARNING_RATE * gradients(estimator, codes, kept, rollouts.plans, curve[-1])[0]
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        curve.append(weights / weights.sum(-1, keepdims=True))
    return np.array(curve)


@dataclass(frozen=True)
class Row:
    """GRPO under one scenario and policy: figures by share; P(complete) of the runs over the steps, at the worst."""

    scenario: str
    policy: str
    figures: dict[float, Figures]
    complete: Array


def simulate(grpo: Estimator, batches: int, runs: int, steps: int) -> list[Row]:
    """All scenarios under all policies."""
    reference = Reference.of(grpo, batches)
    return [
        Row(
            scenario.name,
            policy.name,
            {share: reference.compare(scenario, policy, share) for share in SHARES},
            train(grpo, scenario, policy, WORST, steps, runs)[..., COMPLETE],
        )
        for scenario in SCENARIOS
        for policy in POLICIES
    ]


def compare_estimators(estimators: dict[str, Estimator], batches: int) -> dict[tuple[str, str], list[Figures]]:
    """Figures at the worst share by scenario and policy, one per estimator."""
    references = [Reference.of(estimator, batches) for estimator in estimators.values()]
    return {
        (scenario.name, policy.name): [reference.compare(scenario, policy, WORST) for reference in references]
        for scenario in SCENARIOS
        for policy in POLICIES
    }


def compare_lone(grpo: Estimator, batches: int) -> dict[tuple[str, int, str], Figures]:
    """Figures at the worst share by state of training, group size and policy, where any trajectory may be hit."""
    found = {}
    for state, probs in (("first", START), ("trained", TRAINED)):
        for group in (2, 4, 8):
            reference = Reference.of(grpo, batches, group, probs)
            for policy in (DROP_WITH_LONE, DROP):
                found[state, group, policy.name] = reference.compare(SCENARIOS[0], policy, WORST)
    return found


def compare_overflow(grpo: Estimator, runs: int, steps: int) -> dict[tuple[int, str], Array]:
    """Plans of the trained bandits (runs, plans) if every plan of so many calls or more stays without a verdict."""
    found = {}
    for calls in (4, 8):
        always = Scenario(f"{calls}+ calls", _from_calls(calls))
        for policy in POLICIES:
            found[calls, policy.name] = train(grpo, always, policy, 1.0, steps, runs)[-1]
    return found


@dataclass(frozen=True)
class Results:
    """All that is reported; ``undisturbed`` is P(complete) over the steps without outage, (steps + 1, runs)."""

    rows: list[Row]
    undisturbed: Array
    estimators: tuple[str, ...]
    by_estimator: dict[tuple[str, str], list[Figures]]
    lone: dict[tuple[str, int, str], Figures]
    overflow: dict[tuple[int, str], Array]


def run(batches: int, runs: int, steps: int) -> Results:
    """The whole simulation; takes seconds."""
    grpo = group_estimator("grpo")
    estimators: dict[str, Estimator] = {
        "GRPO": grpo,
        "GRPO, no std": group_estimator("grpo", norm_adv_by_std_in_grpo=False),
        "RLOO": group_estimator("rloo"),
        "REINFORCE++": reinforce_pp,
    }
    return Results(
        simulate(grpo, batches, runs, steps),
        train(grpo, SCENARIOS[0], NO_OUTAGE, 0.0, steps, runs)[..., COMPLETE],
        tuple(estimators),
        compare_estimators(estimators, batches),
        compare_lone(grpo, batches),
        compare_overflow(grpo, runs, steps),
    )


def main() -> None:
    args = _arguments()
    results = run(args.batches, args.runs, args.steps)
    report(results)
    if args.plot:
        plot(results, args.plot)
    if args.json:
        args.json.write_text(json.dumps(as_json(results), indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=4000, help="batches of 64 trajectories for the bias")
    parser.add_argument("--runs", type=int, default=32, help="bandits trained per row")
    parser.add_argument("--steps", type=int, default=200, help="steps of training")
    parser.add_argument("--plot", type=Path, help="also draw the figures to this PNG file")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if args.batches < 2 * BLOCKS or args.runs < 2 or args.steps < 1:
        parser.error(f"at least --batches {2 * BLOCKS}, --runs 2 and --steps 1 are needed")
    return args


def report(results: Results) -> None:
    """Print the four tables."""
    console = Console(width=120)
    console.print(_main_table(results.rows))
    console.print(f"P(complete): {START[COMPLETE]:.2f} before, {_mean_error(results.undisturbed[-1])} without outage\n")
    console.print(_estimator_table(results.estimators, results.by_estimator))
    console.print(_lone_table(results.lone))
    console.print(_overflow_table(results.overflow))


def _main_table(rows: Sequence[Row]) -> Table:
    shares = [f"bias {share:.0%}" for share in SHARES]
    title = f"GRPO, groups of {GROUP}: bias in % by share of outage; cosine, worth and training at {WORST:.0%}"
    table = Table("outage hits", "policy", *shares, "cosine", "worth %", "P(complete)", title=title, box=box.SIMPLE)
    for row in rows:
        worst = row.figures[WORST]
        bias = [_bias(row.figures[share]) for share in SHARES]
        complete = _mean_error(row.complete[-1])
        cells = (*bias, f"{worst.cosine:.3f}", _worth(worst), complete)
        _add_in_section(table, row.scenario, row.policy, cells)
    return table


def _estimator_table(estimators: Sequence[str], found: dict[tuple[str, str], list[Figures]]) -> Table:
    title = f"bias in % / cosine at {WORST:.0%}, by verl's estimator"
    table = Table("outage hits", "policy", *estimators, title=title, box=box.SIMPLE)
    for (scenario, policy), figures in found.items():
        cells = (f"{_bias(item)} / {item.cosine:.3f}" for item in figures)
        _add_in_section(table, scenario, policy, cells)
    return table


def _add_in_section(table: Table, scenario: str, policy: str, cells: Iterable[str]) -> None:
    """A row of the scenario's section, which names the scenario once."""
    table.add_row(scenario if policy == POLICIES[0].name else "", policy, *cells)
    if policy == POLICIES[-1].name:
        table.add_section()


def _lone_table(found: dict[tuple[str, int, str], Figures]) -> Table:
    title = f"lone members under GRPO at {WORST:.0%}, where any trajectory may be hit"
    headers = ("the planner is", "group", "policy", "lone % of trained", "bias %", "cosine", "worth %")
    table = Table(*headers, title=title, box=box.SIMPLE)
    for (state, group, policy), item in found.items():
        cells = (f"{item.lone:.1f}", _bias(item), f"{item.cosine:.3f}", _worth(item))
        table.add_row(state, str(group), policy, *cells)
    return table


def _overflow_table(found: dict[tuple[int, str], Array]) -> Table:
    title = "GRPO after training, where every plan from so many calls on stays without a verdict"
    table = Table("calls", "policy", "P(complete)", "P(wandering)", title=title, box=box.SIMPLE)
    for (calls, policy), plans in found.items():
        cells = (_mean_error(plans[:, COMPLETE]), _mean_error(plans[:, WANDERING]))
        _add_in_section(table, f"{calls}+", policy, cells)
    return table


def _bias(item: Figures) -> str:
    return f"{item.bias:.1f} ±{item.errors[0]:.1f}"


def _worth(item: Figures) -> str:
    return f"{item.worth:.0f} ±{item.errors[2]:.0f}"


def _mean_error(values: Array) -> str:
    return f"{values.mean():.2f} ±{values.std(ddof=1) / np.sqrt(len(values)):.2f}"


def as_json(results: Results) -> dict[str, Any]:
    """Everything that the tables show, as plain values."""
    undisturbed = results.undisturbed[-1].mean()
    return {
        "complete": {"before": START[COMPLETE], "no_outage": undisturbed},
        "grpo": [
            {"scenario": row.scenario, "policy": row.policy, "share": share, **vars(item)}
            for row in results.rows
            for share, item in row.figures.items()
        ],
        "trained": [
            {"scenario": row.scenario, "policy": row.policy, "complete": row.complete[-1].mean()}
            for row in results.rows
        ],
        "estimators": [
            {"scenario": scenario, "policy": policy, "estimator": name, **vars(item)}
            for (scenario, policy), items in results.by_estimator.items()
            for name, item in zip(results.estimators, items, strict=True)
        ],
        "lone": [
            {"planner": state, "group": group, "policy": policy, **vars(item)}
            for (state, group, policy), item in results.lone.items()
        ],
        "overflow": [
            {"calls": calls, "policy": policy, **dict(zip(_NAMES, plans.mean(0).tolist(), strict=True))}
            for (calls, policy), plans in results.overflow.items()
        ],
    }


def plot(results: Results, path: Path) -> None:
    """Bias by share of outage (above) and P(complete) over training (below), one column per scenario."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(SCENARIOS), sharey="row")
    for scenario, (above, below) in zip(SCENARIOS, axes.T, strict=True):
        mine = [row for row in results.rows if row.scenario == scenario.name]
        _draw_bias(above, mine)
        _draw_training(below, mine, results.undisturbed)
        above.set_title(scenario.name)
    axes[0, 0].set_ylabel("bias, % of the gradient without outage")
    axes[1, 0].set_ylabel(f"P(complete plan), {WORST:.0%} outage")
    handles, labels = axes[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle("What is done about missing verdicts, by what the outage hits (GRPO, groups of 8)")
    figure.savefig(path, dpi=110)


def _draw_bias(axis: Any, rows: Sequence[Row]) -> None:
    for row, style in zip(rows, _STYLES, strict=True):
        bias = [0.0, *(item.bias for item in row.figures.values())]
        axis.plot([0, *(100 * share for share in row.figures)], bias, **style)
    axis.set_xlabel("outage, %")
    axis.grid(alpha=0.3)


def _draw_training(axis: Any, rows: Sequence[Row], undisturbed: Array) -> None:
    axis.plot(undisturbed.mean(-1), color="black", linewidth=1, label="no outage")
    for row, style in zip(rows, _STYLES, strict=True):
        axis.plot(row.complete.mean(-1), label=row.policy, **style)
    axis.set_xlabel("step")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)


if __name__ == "__main__":
    main()
