"""Validation metrics with sessions that have no score, against verl's own."""

from __future__ import annotations

from typing import Any

import pytest
from verl.trainer.ppo.metric_utils import process_validation_metrics as verls
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rltr_verl.rollout.validation import process_validation_metrics


class Pass:
    """A validation pass: prompts with the sessions asked for, and rows of those that were scored."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.uids: list[str] = []
        self.infos: dict[str, list[Any]] = {"reward": [], "acc": [], "calls": [], "unscored": []}
        self.expected: dict[tuple[str, str], int] = {}

    def prompt(self, source: str, accs: list[float | None]) -> Pass:
        uid = f"uid{len(self.expected)}"
        self.expected[source, uid] = len(accs)
        for acc in accs:
            if acc is not None:
                self.sources.append(source)
                self.uids.append(uid)
                row = {"reward": acc - 0.1, "acc": acc, "calls": 2.0, "unscored": 0.0}
                for name, value in row.items():
                    self.infos[name].append(value)
        return self

    def metrics(self, function: Any = process_validation_metrics) -> dict[str, Any]:
        return function(self.sources, self.uids, self.infos, expected_acc_counts=self.expected)

    def logged(self) -> dict[str, float]:
        """As the trainer logs them: its own method, which looks the function up in its module."""
        return PPOTrainer._val_metrics_update(None, self.sources, self.uids, self.infos, [2], self.expected)


def test_verl_itself_counts_a_missing_session_as_wrong():
    """What the replacement is for; if verl changes it, ours can go."""
    assert Pass().prompt("w", [1.0]).prompt("w", [None]).metrics(verls)["w"]["acc"]["mean@1"] == 0.5


def test_the_mean_is_over_scored_rows_and_the_share_is_shown():
    logged = Pass().prompt("w", [1.0]).prompt("w", [0.0]).prompt("w", [1.0]).prompt("w", [None]).logged()
    assert logged["val-core/w/acc/mean@1"] == pytest.approx(2 / 3)
    assert logged["val-aux/w/reward/mean@1"] == pytest.approx(2 / 3 - 0.1)
    assert logged["val-aux/w/unscored/mean@1"] == pytest.approx(1 / 4)


def test_several_rollouts_a_prompt_are_one_mean_under_one_name():
    """verl would log the full prompts as mean@4, the others beside it as mean@1 to mean@3."""
    logged = Pass().prompt("w", [1.0, 1.0, 1.0, 0.0]).prompt("w", [0.0, None, None, None]).logged()
    assert logged["val-core/w/acc/mean@4"] == pytest.approx(3 / 5)
    assert logged["val-aux/w/unscored/mean@4"] == pytest.approx(3 / 8)
    assert not any("mean@1" in name or "mean@3" in name for name in logged)


def test_the_name_does_not_change_where_every_prompt_lost_a_session():
    logged = Pass().prompt("w", [1.0, 0.0, None]).prompt("w", [1.0, None, 1.0]).logged()
    assert logged["val-core/w/acc/mean@3"] == pytest.approx(3 / 4)
    assert logged["val-aux/w/unscored/mean@3"] == pytest.approx(2 / 6)


def test_sources_are_kept_apart():
    found = Pass().prompt("a", [1.0]).prompt("b", [0.0]).prompt("b", [None]).logged()
    assert found["val-core/a/acc/mean@1"] == 1.0 and found["val-aux/a/unscored/mean@1"] == 0.0
    assert found["val-core/b/acc/mean@1"] == 0.0 and found["val-aux/b/unscored/mean@1"] == 0.5


def test_a_source_without_any_score_has_a_share_and_no_mean():
    logged = Pass().prompt("a", [1.0]).prompt("b", [None]).logged()
    assert logged["val-aux/b/unscored/mean@1"] == 1.0
    assert [name for name in logged if "/b/" in name] == ["val-aux/b/unscored/mean@1"]


def test_with_everything_scored_the_values_are_verls():
    whole = Pass().prompt("a", [1.0, 0.0]).prompt("a", [1.0, 1.0])
    ours, theirs = whole.metrics(), whole.metrics(verls)
    assert ours["a"].pop("unscored") == {"mean@2": 0.0} and theirs["a"].pop("unscored")
    assert theirs["a"].pop("acc_success_only") == theirs["a"]["acc"]
    assert ours == theirs


def test_a_run_with_another_reward_manager_is_left_to_verl():
    other = Pass().prompt("a", [1.0]).prompt("a", [None])
    del other.infos["unscored"]
    assert other.metrics() == other.metrics(verls)
    assert other.metrics()["a"]["acc"]["mean@1"] == 0.5
