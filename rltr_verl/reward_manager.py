"""verl's reward manager ``rltr``: hands the rollout's trajectory to the scorer.

verl gives a reward manager token ids without the response mask, so model text and observations cannot be told apart
here. The planner loop therefore sends the structured trajectory along (``extra_fields``), and this is the one that is
scored.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from typing import Any

from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.registry import register

from rltr_verl.config import RltrSettings, from_omegaconf
from rltr_verl.dump import TrajectoryDump
from rltr_verl.errors import DataError, Unscored
from rltr_verl.judge import Checker, build_checker
from rltr_verl.masks import TRAINED_FIELD
from rltr_verl.rollout import unscored
from rltr_verl.scoring import ScoredTrajectory, Scorer
from rltr_verl.tool_metrics import TOOL_METRICS_FIELD
from rltr_verl.trajectory import TRAJECTORY_FIELD, Trajectory

NAME = "rltr"
"""Value of ``reward.reward_manager.name``."""


@register(NAME)
class RltrRewardManager(RewardManagerBase):
    """Scores one trajectory a call; see :class:`rltr_verl.scoring.Scorer` for the formula.

    Args:
        reward_router_address: where verl serves ``reward.reward_model``; the judge, if ``rltr.judge.backend=hosted``.

    Raises:
        ConfigError: a wrong setting, or the backend ``hosted`` while verl serves no model.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        gc.freeze()  # this process has loaded verl; looking through all of it now and then stalls every vote
        settings = from_omegaconf(config)
        self.scorer = Scorer(settings, _hosted_checker(config, settings, reward_router_address))
        self.dump = TrajectoryDump(settings.dump_dir) if settings.dump_dir else None

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score the last sequence of ``data``, as verl asks.

        Returns:
            ``reward_score`` (the total) and ``reward_extra_info``: floats under keys fixed for the run.

        Raises:
            Unscored: no verdict; verl drops the trajectory from its group instead of training on a stand-in. The
                replay buffer is told the reason first.
            DataError: no trajectory came with the sequence.
        """
        fields = {key: values[-1] for key, values in data.non_tensor_batch.items()}
        sent = _trajectory(fields)
        trajectory = Trajectory.from_dict(sent)
        row = _row(fields)
        scored = await self.scorer.score(trajectory, row)
        if self.dump:
            self.dump.write({**_record(fields, row, sent, scored), **_ids(data, fields)})
        if scored.total is None:
            reason = scored.unscored or "no verdict"
            missing = unscored.Missing(reason, by_judge=not scored.faults)
            await unscored.report(str(fields.get("uid")), int(fields.get("session_id", 0)), missing)
            raise Unscored(reason, where=f"row {row.get('index', '?')}")
        return {"reward_score": scored.total, "reward_extra_info": scored.metrics | _tool_figures(fields)}


def _hosted_checker(config: Any, settings: RltrSettings, address: str | None) -> Checker | None:
    """The judge that verl serves; None for the other backends, which the scorer builds by itself."""
    if settings.judge.backend != "hosted":
        return None
    from rltr_verl.judge.endpoint import Hosted

    hosted = Hosted(address, config.reward.reward_model.model_path) if address else None
    return build_checker(settings.judge, hosted=hosted)


def _trajectory(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the planner loop sent along."""
    value = (fields.get("tool_extra_fields") or {}).get(TRAJECTORY_FIELD)
    if value is None:
        problem = f"no trajectory came with the rollout (agent loop: {fields.get('agent_name', 'the default one')})"
        fix = (
            'give each row the column agent_name="rltr_planner", or set '
            "actor_rollout_ref.rollout.agent.default_agent_loop=rltr_planner."
        )
        raise DataError(problem, where="reward manager rltr", fix=fix)
    return json.loads(value) if isinstance(value, str) else dict(value)


def _row(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the terms see of the query's row: ``extra_info``, and the reference of ``reward_model`` if it has none."""
    row = dict(fields.get("extra_info") or {})
    row.setdefault("data_source", fields.get("data_source"))
    reference = (fields.get("reward_model") or {}).get("ground_truth")
    if row.get("reference") is None and reference is not None:
        row["reference"] = reference
    return row


def _record(
    fields: Mapping[str, Any], row: Mapping[str, Any], trajectory: dict[str, Any], scored: ScoredTrajectory
) -> dict[str, Any]:
    """One line of the dump: where it comes from, the score in parts, and the whole trajectory."""
    origin = {key: fields.get(key) for key in ("uid", "session_id", "global_steps", "data_source")}
    known = {key: row.get(key) for key in ("index", "split", "kind", "lang", "needs")}
    return {**origin, **known, **scored.record(), "trajectory": trajectory}


def _tool_figures(fields: Mapping[str, Any]) -> dict[str, float]:
    """Counts and seconds per tool, as the loop found them; the same keys for every row."""
    sent = (fields.get("tool_extra_fields") or {}).get(TOOL_METRICS_FIELD)
    return json.loads(sent) if sent else {}


def _ids(data: DataProto, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The last sequence's ids and which of them train: what ``rltr verify-masks`` reads."""
    trained = (fields.get("tool_extra_fields") or {}).get(TRAINED_FIELD)
    if trained is None:
        return {}
    prompt, response = (data.batch[name][-1] for name in ("prompts", "responses"))
    ids = {"prompt_ids": prompt[: fields["prompt_len"]], "response_ids": response[: fields["response_len"]]}
    return {**{name: values.tolist() for name, values in ids.items()}, "trained": json.loads(trained)}
