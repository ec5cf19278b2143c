"""The turns of a planner, without verl: ask for tokens, read them, run the calls, show the observations.

One implementation for training and evaluation: :class:`rltr_verl.rollout.planner_loop.PlannerLoop` passes verl's server
as ``generate``, :mod:`rltr_verl.rollout.local` an engine in the same process.

Masks: 1 on exactly the ids the policy sampled (the stop marker included), 0 on all else.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rltr_verl.config import RltrSettings, RolloutSettings
from rltr_verl.errors import DataError
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.tool_runner import ToolRunner
from rltr_verl.tool_state import Trajectory as ToolTrajectory
from rltr_verl.tooling import load_tools, schemas
from rltr_verl.trajectory import Trajectory, Turn


class Sampled(Protocol):
    """What an engine returns for one turn; verl's ``TokenOutput`` is one."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None


@dataclass
class SampledIds:
    """A turn from elsewhere than verl's server; ``stop_reason`` "aborted" ends the trajectory."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = None


Generate = Callable[[list[int], int], Awaitable[Sampled]]
"""``await generate(ids, max_tokens)``: sample one turn behind ``ids``, ending behind the stop marker."""


Read = Callable[[str], Turn]
"""What the policy wrote in one turn -> its calls and faults."""


@dataclass(frozen=True)
class Planner:
    """What all trajectories of a process share; built once per tokenizer and settings."""

    settings: RltrSettings
    template: ChatTemplate
    runner: ToolRunner
    schemas: Mapping[str, dict[str, Any]]
    read: Read

    @classmethod
    def build(cls, settings: RltrSettings, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> Planner:
        """Load the tools of ``settings`` and read the tokenizer's chat template.

        Raises ConfigError for an unknown tool or setting, ModelError for an unusable chat template.
        """
        tools = load_tools(settings.tools, settings.tool_settings)
        template = ChatTemplate(tokenizer, schemas(tools), template_kwargs)
        runner = ToolRunner.from_settings(tools, settings.rollout)
        read = _reader(settings.rollout, tokenizer, schemas(tools))
        shown = {name: tool.schema for name, tool in tools.items()}
        return cls(settings, template, runner, shown, read)

    def shown(self, extra_info: Any) -> dict[str, dict[str, Any]]:
        """The tools of a row: all, or those that ``extra_info.tool_selection`` names.

        Raises DataError when it names a tool that the recipe does not have.
        """
        chosen = extra_info.get("tool_selection") if isinstance(extra_info, Mapping) else None
        if chosen is None or (isinstance(chosen, Sized) and len(chosen) == 0):
            return dict(self.schemas)
        names = [chosen] if isinstance(chosen, str) or not isinstance(chosen, Iterable) else list(chosen)
        unknown = [name for name in names if not isinstance(name, str) or name not in self.schemas]
        if unknown:
            problem = f"field 'extra_info.tool_selection' names {unknown[0]!r}, which is no tool of this recipe"
            fix = f"name tools out of {', '.join(self.schemas) or 'none'}, or add it to rltr.tools."
            raise DataError(problem, where=f"row {extra_info.get('index', '?')}", fix=fix)
        return {name: schema for name, schema in self.schemas.items() if name in names}


@dataclass
class Rollout:
    """A growing trajectory: ids behind the prompt, their mask and log-probs, and the turns so far.

    ``limit`` is the number of ids behind the prompt that it may hold.
    """

    prompt_ids: list[int]
    limit: int
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    tool_seconds: float = 0.0
    end: str = "turn_limit"

    @property
    def room(self) -> int:
        """Ids that still fit."""
        return self.limit - len(self.ids)

    def add_sampled(self, output: Sampled) -> list[int]:
        """Append what the policy sampled, as far as it fits; returns those ids."""
        room = self.room
        ids = list(output.token_ids[:room])
        self.ids += ids
        self.mask += [1] * len(ids)
        self.log_probs += list(output.log_probs[:room]) if output.log_probs else [0.0] * len(ids)
        return ids

    def add_context(self, ids: Sequence[int]) -> None:
        """Append ids that the policy did not choose."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)

    def trajectory(self, query: str, shown: Mapping[str, dict[str, Any]]) -> Trajectory:
        """The typed trajectory of this rollout."""
        return Trajectory(query, tuple(self.turns), tuple(shown.values()), self.end)


async def take_turns(
    planner: Planner,
    rollout: Rollout,
    generate: Generate,
    allowed: Collection[str],
    row: Mapping[str, Any] | None = None,
) -> None:
    """Let the policy take turns until it stops, runs out of turns or of room; fills ``rollout``.

    Tools with state get ``row`` (the row's ``extra_info``) when they are opened, and are closed however this ends.
    Nothing that the policy or a tool does raises; only ``generate`` may.
    """
    async with planner.runner.trajectory(row) as opened:
        await _take_turns(planner, rollout, generate, allowed, opened)


async def _take_turns(
    planner: Planner, rollout: Rollout, generate: Generate, allowed: Collection[str], opened: ToolTrajectory
) -> None:
    limits = planner.settings.rollout
    for index in range(limits.max_turns):
        output = await generate(rollout.prompt_ids + rollout.ids, rollout.room)
        sampled = rollout.add_sampled(output)
        turn = planner.read(planner.template.decode(sampled))
        rollout.turns.append(turn)
        end = _end(rollout, turn, sampled, output.stop_reason)
        if end is not None:
            rollout.end = end
            return
        if index + 1 < limits.max_turns and not await _observe(planner, rollout, turn, sampled, allowed, opened):
            rollout.end = "length"
            return


def _end(rollout: Rollout, turn: Turn, sampled: list[int], stop_reason: str | None) -> str | None:
    """How the trajectory ended with this turn, or None if it goes on."""
    if rollout.room <= 0 and not turn.stopped:
        return "length"
    if not sampled or stop_reason in ("aborted", "abort"):
        return "aborted"
    if turn.stopped:
        return "answer"
    return None if turn.calls else "no_call"


async def _observe(
    planner: Planner,
    rollout: Rollout,
    turn: Turn,
    sampled: list[int],
    allowed: Collection[str],
    opened: ToolTrajectory,
) -> bool:
    """Run the turn's calls and append their observations; False when they no longer fit."""
    template, limits = planner.template, planner.settings.rollout
    start = time.perf_counter()
    observations = await planner.runner.run(turn.calls, allowed, opened)
    rollout.tool_seconds += time.perf_counter() - start
    ids, texts = template.observe(
        [item.text for item in observations],
        turn_ended=template.ends_turn(sampled),
        budget=rollout.room - 1,
        limit=limits.max_observation_tokens,
        keep=limits.observation_cut,
    )
    seen = [replace(item, text=text) for item, text in zip(observations, texts, strict=True)]
    rollout.turns[-1] = replace(turn, observations=tuple(seen))
    rollout.add_context(ids)
    return bool(ids)


def _reader(limits: RolloutSettings, tokenizer: Any, shown: Sequence[Mapping[str, Any]]) -> Read:
    """The one place that chooses how calls are read."""
    from rltr_verl.rollout.call_formats import read_calls_with  # imports verl's parsers

    return read_calls_with(limits.format, tokenizer, schemas=shown, prefilled_think=limits.thinking)


def query_of(messages: Sequence[Mapping[str, Any]], extra_info: Any) -> str:
    """The query of a row: ``extra_info.query``, else the last user message."""
    given = extra_info.get("query") if isinstance(extra_info, Mapping) else None
    if isinstance(given, str) and given:
        return given
    users = [message["content"] for message in messages if message.get("role") == "user"]
    return str(users[-1]) if users else ""
