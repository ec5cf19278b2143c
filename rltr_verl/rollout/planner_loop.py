"""The planner as a verl agent loop: think, call tools, observe, until the stop marker.

Registered as ``rltr_planner``. What differs from verl's stock ``tool_agent``: calls are read by our parser (outside of
``<think>`` only, unreadable ones answered with an error), every call gets a typed observation, the loop stops at
``<answer>``, and the structured :class:`Trajectory` travels to the reward manager in ``extra_fields``.

Masks: 1 on exactly the ids the policy sampled (the stop marker included), 0 on all else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

from rltr_verl.config import RltrSettings, from_omegaconf
from rltr_verl.parsing import parse_turn
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.tool_runner import ToolRunner
from rltr_verl.tooling import load_tools, schemas
from rltr_verl.trajectory import Trajectory, Turn

logger = logging.getLogger(__name__)

TRAJECTORY_FIELD = "rltr_trajectory"
"""Key of ``extra_fields`` under which the trajectory travels, as JSON text."""


@dataclass
class _Shared:
    """What all trajectories of a worker process share; built once per config."""

    settings: RltrSettings
    template: ChatTemplate
    runner: ToolRunner
    schemas: dict[str, dict[str, Any]]


_shared_by_tokenizer: dict[int, _Shared] = {}


@dataclass
class _Rollout:
    """The growing trajectory: ids behind the prompt, their mask and log-probs, and the turns so far."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    end: str = "turn_limit"

    def add_sampled(self, output: TokenOutput, budget: int) -> list[int]:
        ids = list(output.token_ids[:budget])
        self.ids += ids
        self.mask += [1] * len(ids)
        self.log_probs += list(output.log_probs[:budget]) if output.log_probs else [0.0] * len(ids)
        return ids

    def add_context(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)


class PlannerLoop(AgentLoopBase):
    """One trajectory per call of :meth:`run`; never raises for anything the policy or a tool does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = self._share()
        self._response_length = int(self.rollout_config.response_length)

    def _share(self) -> _Shared:
        key = id(self.tokenizer)
        if key not in _shared_by_tokenizer:
            settings = from_omegaconf(self.config)
            tools = load_tools(settings.tools, settings.tool_settings)
            template = ChatTemplate(self.tokenizer, schemas(tools), self.apply_chat_template_kwargs)
            limits = settings.rollout
            runner = ToolRunner(tools, timeout_s=limits.tool_timeout_s, max_parallel_calls=limits.max_parallel_calls)
            _shared_by_tokenizer[key] = _Shared(settings, template, runner, {n: t.schema for n, t in tools.items()})
        return _shared_by_tokenizer[key]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Roll out one trajectory.

        Args:
            sampling_params: temperature, top_p, top_k, logprobs, as verl sets them for training or validation.
            **kwargs: the row (``raw_prompt``, ``extra_info``, ...).

        Returns:
            One output; an empty list when the rollout engine failed, so that verl leaves the session out instead of
            charging the policy for it.
        """
        messages = [dict(message) for message in kwargs["raw_prompt"]]
        shown = self._shown(kwargs.get("extra_info"))
        rollout = _Rollout(self._shared.template.prompt_ids(messages, list(shown.values())))
        limit = int(self.rollout_config.prompt_length)
        if len(rollout.prompt_ids) > limit:
            logger.error("prompt of %d tokens exceeds data.max_prompt_length=%d; session left out", len(rollout.prompt_ids), limit)
            return []
        try:
            await self._turns(rollout, sampling_params, list(shown))
        except Exception:  # the engine's failure, not the policy's: leave the session out, say why
            logger.exception("the rollout engine failed; this session is left out")
            return []
        return self._output(rollout, _query(messages, kwargs.get("extra_info")), tuple(shown.values()))

    def _shown(self, extra_info: Any) -> dict[str, dict[str, Any]]:
        """The tools of this row: all, or ``extra_info.tool_selection``."""
        chosen = extra_info.get("tool_selection") if isinstance(extra_info, Mapping) else None
        if chosen is None or len(chosen) == 0:
            return self._shared.schemas
        return {name: schema for name, schema in self._shared.schemas.items() if name in set(chosen)}

    async def _turns(self, rollout: _Rollout, sampling_params: Mapping[str, Any], allowed: list[str]) -> None:
        request_id = uuid4().hex
        settings = self._shared.settings.rollout
        for index in range(settings.max_turns):
            output = await self._generate(rollout, sampling_params, request_id)
            budget = self._response_length - len(rollout.ids)
            sampled = rollout.add_sampled(output, budget)
            turn = parse_turn(self._shared.template.decode(sampled), settings.thinking)
            rollout.turns.append(turn)
            cut = len(rollout.ids) >= self._response_length and not turn.stopped
            if cut or not sampled or output.stop_reason in ("aborted", "abort"):
                rollout.end = "length" if cut else "aborted"
                return
            if turn.stopped or not turn.calls:
                rollout.end = "answer" if turn.stopped else "no_call"
                return
            if index + 1 < settings.max_turns and not await self._observe(rollout, turn, sampled, allowed):
                rollout.end = "length"
                return

    async def _generate(self, rollout: _Rollout, sampling_params: Mapping[str, Any], request_id: str) -> TokenOutput:
        budget = self._response_length - len(rollout.ids)
        params = {**sampling_params, **self._stop_params(), "max_tokens": budget}
        with simple_timer("generate_sequences", rollout.metrics):
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=rollout.prompt_ids + rollout.ids, sampling_params=params
            )
        _merge_extra(rollout.extra, output.extra_fields)
        return output

    def _stop_params(self) -> dict[str, Any]:
        """Stop at the marker and keep it; SGLang spells the second part differently."""
        keep = "no_stop_trim" if self.rollout_config.name == "sglang" else "include_stop_str_in_output"
        return {"stop": [self._shared.settings.rollout.stop_marker], keep: True}

    async def _observe(self, rollout: _Rollout, turn: Turn, sampled: list[int], allowed: list[str]) -> bool:
        """Run the turn's calls and append their observations; False when they no longer fit."""
        template, settings = self._shared.template, self._shared.settings.rollout
        with simple_timer("tool_calls", rollout.metrics):
            observations = await self._shared.runner.run(turn.calls, allowed)
        seen = [replace(item, text=template.cut_tokens(item.text, settings.max_observation_tokens)) for item in observations]
        room = self._response_length - len(rollout.ids) - 1
        ids = template.observation_ids([item.text for item in seen], turn_ended=sampled[-1] in template.eos_ids, budget=room)
        rollout.turns[-1] = replace(turn, observations=tuple(seen))
        rollout.add_context(ids)
        return bool(ids)

    def _output(self, rollout: _Rollout, query: str, shown: tuple[dict[str, Any], ...]) -> AgentLoopOutput:
        if not rollout.ids:  # verl puts the reward on the last token, so there must be one; it is not trained
            rollout.add_context([self.tokenizer.eos_token_id or 0])
        trajectory = Trajectory(query, tuple(rollout.turns), shown, rollout.end)
        extra = {**rollout.extra, "turn_scores": [], "tool_rewards": []}
        extra[TRAJECTORY_FIELD] = json.dumps(trajectory.to_dict(), ensure_ascii=False)
        return AgentLoopOutput(
            prompt_ids=rollout.prompt_ids,
            response_ids=rollout.ids,
            response_mask=rollout.mask,
            response_logprobs=rollout.log_probs,
            multi_modal_data={},
            num_turns=2 * len(rollout.turns),
            metrics=AgentLoopMetrics(**rollout.metrics),
            extra_fields=extra,
        )


def _query(messages: Sequence[Mapping[str, Any]], extra_info: Any) -> str:
    given = extra_info.get("query") if isinstance(extra_info, Mapping) else None
    if isinstance(given, str) and given:
        return given
    users = [message["content"] for message in messages if message.get("role") == "user"]
    return str(users[-1]) if users else ""


def _merge_extra(extra: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Keep the first turn's fields and the newest weights' version, which verl's staleness control reads."""
    if not extra:
        extra.update(new)
    elif new.get("max_global_steps") is not None:
        extra["max_global_steps"] = new["max_global_steps"]
