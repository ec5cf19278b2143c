"""A scripted policy of the offline world as the teacher: nothing is sampled, the tools and the loop are real."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from rltr_verl.coldstart.records import Task
from rltr_verl.coldstart.teacher import Played, Teacher
from rltr_verl.errors import ConfigError, DataError
from rltr_verl.rollout.turns import Planner, Rollout, SampledIds, query_of, take_turns
from rltr_verl.world.policies import POLICIES


class ScriptedTeacher(Teacher):
    """Plays queries with the policy that ``rltr.teacher.policy`` names. Rows need the world's ``plan``.

    Raises:
        ConfigError: no policy has that name.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        name = planner.settings.teacher.policy
        if name not in POLICIES:
            close = get_close_matches(name, POLICIES, n=1)
            fix = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(POLICIES)}."
            raise ConfigError(f"unknown policy '{name}'", where="rltr.teacher.policy", fix=fix)
        self.name = name

    async def play(self, task: Task) -> Played:
        """See :class:`Teacher`; the attempt's seed is the policy's."""
        if "plan" not in task.info:
            fix = "take the queries of an offline world (rltr world build), or rltr.teacher.backend=endpoint."
            problem = "a scripted policy needs the field 'extra_info.plan'"
            raise DataError(problem, where=f"query {task.query_id}", fix=fix)
        policy, template = POLICIES[self.name](seed=task.seed), self._planner.template
        shown, prompt = self._planner.shown(task.info), [dict(message) for message in task.prompt]
        limit = self._planner.settings.teacher.max_trajectory_tokens
        rollout = Rollout(template.prompt_ids(prompt, list(shown.values())), limit)
        row: dict[str, Any] = {"prompt": prompt, "extra_info": dict(task.info)}

        async def generate(ids: list[int], max_tokens: int) -> SampledIds:
            seen = [item.text for turn in rollout.turns for item in turn.observations]
            return SampledIds(template.encode(policy.act(row, seen)))

        await take_turns(self._planner, rollout, generate, list(shown), task.info)
        return Played(rollout.trajectory(query_of(prompt, task.info), shown))
