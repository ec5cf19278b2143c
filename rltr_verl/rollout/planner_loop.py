"""The planner as a verl agent loop: think, call tools, observe, until the stop marker.

Registered as ``rltr_planner``. What differs from verl's stock ``tool_agent``: calls are read by our rules (outside of
``<think>`` only, unreadable ones answered with an error), every call gets a typed observation, the loop stops at
``<answer>``, and the structured :class:`Trajectory` travels to the reward manager in ``extra_fields``. The turns
themselves are in :mod:`rltr_verl.rollout.turns`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from rltr_verl.config import from_omegaconf
from rltr_verl.masks import TRAINED_FIELD, trained_spans
from rltr_verl.parsing import STOP_MARKER
from rltr_verl.rollout.call_formats import stop_token_ids
from rltr_verl.rollout.turns import Generate, Planner, Rollout, query_of, take_turns
from rltr_verl.rows import read_messages
from rltr_verl.tool_metrics import TOOL_METRICS_FIELD, tool_metrics
from rltr_verl.trajectory import TRAJECTORY_FIELD, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Shared:
    """What all trajectories of a process share. Reading an interpolated setting takes half a millisecond."""

    planner: Planner
    prompt_length: int
    response_length: int
    engine: str
    stop_token_ids: tuple[int, ...]


_shared: dict[int, _Shared] = {}


class PlannerLoop(AgentLoopBase):
    """One trajectory per call of :meth:`run`; never raises for anything the policy or a tool does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if id(self.tokenizer) not in _shared:
            _shared[id(self.tokenizer)] = self._share()
        self._limits = _shared[id(self.tokenizer)]
        self._planner = self._limits.planner

    def _share(self) -> _Shared:
        planner = Planner.build(from_omegaconf(self.config), self.tokenizer, self.apply_chat_template_kwargs)
        rollout = self.rollout_config
        stop_ids = tuple(stop_token_ids(planner.settings.rollout.format, self.tokenizer))
        return _Shared(planner, int(rollout.prompt_length), int(rollout.response_length), str(rollout.name), stop_ids)

    async def run(  # type: ignore[override]  # verl takes a list too
        self, sampling_params: dict[str, Any], **kwargs: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Roll out one trajectory.

        Args:
            sampling_params: temperature, top_p, top_k, logprobs, as verl sets them for training or validation.
            **kwargs: the row (``raw_prompt``, ``extra_info``, ...).

        Returns:
            One output; an empty list when the rollout engine failed, so that verl leaves the session out instead of
            charging the policy for it.
        """
        messages = read_messages(kwargs["raw_prompt"])
        row = kwargs.get("extra_info")
        shown = self._planner.shown(row)
        prompt_ids = self._planner.template.prompt_ids(messages, list(shown.values()))
        limit = self._limits.prompt_length
        if len(prompt_ids) > limit:
            logger.error("prompt of %d tokens exceeds data.max_prompt_length=%d; left out", len(prompt_ids), limit)
            return []
        rollout = Rollout(prompt_ids, self._limits.response_length)
        extra: dict[str, Any] = {}
        metrics: dict[str, Any] = {}
        try:
            generate = self._generate(sampling_params, extra, metrics)
            await take_turns(self._planner, rollout, generate, list(shown), row)
        except Exception:  # the engine's failure, not the policy's: leave the session out, say why
            logger.exception("the rollout engine failed; this session is left out")
            return []
        metrics["tool_calls"] = rollout.tool_seconds
        trajectory = rollout.trajectory(query_of(messages, row), shown)
        return self._output(rollout, trajectory, extra, metrics)

    def _generate(self, sampling_params: Mapping[str, Any], extra: dict[str, Any], metrics: dict[str, Any]) -> Generate:
        """verl's server as ``generate``; its extra fields and its time are collected in ``extra`` and ``metrics``."""
        request_id = uuid4().hex

        async def generate(ids: list[int], max_tokens: int) -> TokenOutput:
            params = {**sampling_params, **self._stop_params(sampling_params), "max_tokens": max_tokens}
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=ids, sampling_params=params
                )
            _merge_extra(extra, output.extra_fields)
            return output

        return generate

    def _stop_params(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Stop at the marker and keep it (SGLang spells the second part differently), and where a call format ends."""
        keep = "no_stop_trim" if self._limits.engine == "sglang" else "include_stop_str_in_output"
        params: dict[str, Any] = {"stop": [STOP_MARKER], keep: True}
        if self._limits.engine in ("vllm", "sglang"):  # they look for the marker in the text that they decode
            params["skip_special_tokens"] = False
        if self._limits.stop_token_ids:
            params["stop_token_ids"] = sorted({*(given.get("stop_token_ids") or ()), *self._limits.stop_token_ids})
        return params

    def _output(
        self, rollout: Rollout, trajectory: Trajectory, extra: Mapping[str, Any], metrics: Mapping[str, Any]
    ) -> AgentLoopOutput:
        if not rollout.ids:  # verl puts the reward on the last token, so there must be one; it is not trained
            rollout.add_context([self.tokenizer.eos_token_id or 0])  # type: ignore[attr-defined]
        fields = {**extra, "turn_scores": [], "tool_rewards": []}
        fields[TRAJECTORY_FIELD] = json.dumps(trajectory.to_dict(), ensure_ascii=False)
        fields[TRAINED_FIELD] = json.dumps(trained_spans(rollout.mask))
        fields[TOOL_METRICS_FIELD] = json.dumps(tool_metrics(trajectory, self._planner.schemas))
        return AgentLoopOutput(
            prompt_ids=rollout.prompt_ids,
            response_ids=rollout.ids,
            response_mask=rollout.mask,
            response_logprobs=rollout.log_probs,
            multi_modal_data={},
            num_turns=2 * len(rollout.turns),
            metrics=AgentLoopMetrics(**metrics),
            extra_fields=fields,
        )


def _merge_extra(extra: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Keep the first turn's fields and the newest weights' version, which verl's staleness control reads."""
    if not extra:
        extra.update(new)
    elif new.get("max_global_steps") is not None:
        extra["max_global_steps"] = new["max_global_steps"]
