"""verl's side of the planner: what the loop sends to the server and hands on. Only the server is scripted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from rltr_verl._compose import compose_recipe
from rltr_verl.errors import DataError
from rltr_verl.rollout.planner_loop import PlannerLoop
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.tool_metrics import TOOL_METRICS_FIELD
from rltr_verl.trajectory import TRAJECTORY_FIELD, Trajectory
from rltr_verl.world import WorldSizes, build_world

PRINTS_MESSAGES = (
    "{% for m in messages %}{{ m | tojson }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Server:
    """Samples the stop marker and keeps what it was asked."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.asked = ids, []

    async def generate(self, **request: Any) -> TokenOutput:
        self.asked.append(request)
        return TokenOutput(token_ids=self.ids, log_probs=[0.0] * len(self.ids), stop_reason="completed")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return build_world(tmp_path_factory.mktemp("world") / "w", sizes=WorldSizes(train=100, val=20, coldstart=100))


@pytest.fixture
def tokenizer(world):
    loaded = AutoTokenizer.from_pretrained(world.model)
    loaded.chat_template = PRINTS_MESSAGES
    return loaded


def loop(world, tokenizer, *overrides: str) -> PlannerLoop:
    config = compose_recipe("rltr_planner", ["scale=cpu", f"rltr.world={world.folder}", *overrides])
    server = Server(tokenizer.encode("<answer>", add_special_tokens=False))
    return PlannerLoop(DictConfigWrap(config), server, tokenizer, None, None, DictConfigWrap(config.data))


@pytest.mark.parametrize(
    ("engine", "keep"), [("transformers", "include_stop_str_in_output"), ("sglang", "no_stop_trim")]
)
async def test_the_row_is_read_as_the_preflight_reads_it_and_the_trajectory_goes_on(world, tokenizer, engine, keep):
    made = loop(world, tokenizer, f"actor_rollout_ref.rollout.name={engine}")
    row = {"role": "user", "content": "q"}
    output = await made.run({"temperature": 1.0}, raw_prompt=[{**row, "name": None, "tool_calls": None}])
    assert output.prompt_ids == ChatTemplate(tokenizer, []).prompt_ids([row])
    (asked,) = made.server_manager.asked
    assert asked["sampling_params"]["stop"] == ["<answer>"] and asked["sampling_params"][keep] is True
    assert (asked["sampling_params"].get("skip_special_tokens") is False) == (engine == "sglang")
    sent = Trajectory.from_dict(json.loads(output.extra_fields[TRAJECTORY_FIELD]))
    assert (sent.query, sent.end, [turn.text for turn in sent.turns]) == ("q", "answer", ["<answer>"])


async def test_a_selection_of_unknown_tools_stops_the_run(world, tokenizer):
    row = {"raw_prompt": [{"role": "user", "content": "q"}], "extra_info": {"index": 3, "tool_selection": ["serach"]}}
    with pytest.raises(DataError, match="row 3: .*tool_selection' names 'serach'"):
        await loop(world, tokenizer).run({}, **row)


async def test_figures_of_every_tool_go_along_with_the_trajectory(world, tokenizer):
    output = await loop(world, tokenizer).run({}, raw_prompt=[{"role": "user", "content": "q"}])
    figures = json.loads(output.extra_fields[TOOL_METRICS_FIELD])
    assert {name.split("/")[1] for name in figures} == {"search", "calculator", "days_between"}
    assert set(figures.values()) == {0.0}
