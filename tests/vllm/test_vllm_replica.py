"""A vLLM replica beside a trainer that changes its weights, under the recipe's settings: `make test-vllm`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from rltr_verl import Trajectory
from rltr_verl._compose import compose_recipe
from rltr_verl.trajectory import TRAJECTORY_FIELD
from rltr_verl.world import World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here; `make venv-vllm` installs it"),
]

BOUND = 1e-4
"""Largest difference of a log-probability between vLLM and the trainer, both in fp32: their sums differ in order."""

SAMPLED = {"temperature": 0.9, "max_tokens": 12, "logprobs": True, "ignore_eos": True}
GREEDY = {"temperature": 0, "max_tokens": 24, "logprobs": True, "ignore_eos": True}
PROMPTS = [[5, 6, 7], list(range(90)), [40] * 20, [300, 301, 302, 303]]


class Rank:
    """A trainer rank: a model with tied embeddings, one step of gradient descent at a time, and verl's adapter."""

    def __init__(self, config: Any, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config import HFModelConfig
        from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

        os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
        self.torch = torch
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.adapter = ServerAdapter(omega_conf_to_dataclass(config), HFModelConfig(path=folder), None)

    def train(self) -> None:
        ids = self.torch.randint(0, 800, (4, 24))
        self.model(ids, labels=ids).loss.backward()
        with self.torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None

    async def push(self, step: int) -> None:
        await self.adapter.update_weights(iter(self.model.state_dict().items()), global_steps=step)

    def log_probs(self, prompt: list[int], output: list[int], temperature: float) -> list[float]:
        with self.torch.no_grad():
            logits = self.model(self.torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        rows = self.torch.log_softmax(logits / temperature, dim=-1)
        return rows.gather(1, self.torch.tensor(output)[:, None])[:, 0].tolist()


@dataclass
class Pair:
    """The replica and its trainer."""

    config: Any
    replica: Any
    trainer: Any
    steps: int = 0

    async def update(self) -> None:
        self.steps += 1
        await self.trainer.train.remote()
        await self.trainer.push.remote(self.steps)

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **request: Any) -> Any:
        """As verl's server manager does."""
        name = request.get("request_id", os.urandom(8).hex())
        return await self.replica.server_handle.generate.remote(
            prompt_ids=prompt_ids, sampling_params=dict(sampling_params), request_id=name
        )

    async def running(self, at_least: int) -> None:
        """Wait until the requests that run have so many tokens together."""
        count = self.replica.server_handle.__ray_call__
        while await count.remote(_tokens_of_running_requests) < at_least:
            await asyncio.sleep(0.05)

    async def difference(self, prompt: list[int], output: Any) -> float:
        """The largest between the log-probs that came with ``output`` and those of the trainer's weights of now."""
        trained = await self.trainer.log_probs.remote(prompt, output.token_ids, SAMPLED["temperature"])
        return max(abs(one - other) for one, other in zip(output.log_probs, trained, strict=True))


def _tokens_of_running_requests(server: Any) -> int:
    states = server.engine.output_processor.request_states.values()
    return sum(state.detokenizer.num_output_tokens() for state in states)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(world: World) -> AsyncIterator[Pair]:
    import ray
    from omegaconf import OmegaConf
    from verl.workers.config import HFModelConfig
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file by name
    small = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1"  # several buckets
    recipe = compose_recipe("rltr_planner", ["scale=cpu", "rollout_engine=vllm", f"rltr.world={world.folder}", small])
    folder = tempfile.mkdtemp(prefix="rv", dir="/tmp")  # Ray's sockets need a short path
    environment = OmegaConf.to_container(recipe.ray_kwargs.ray_init.runtime_env)
    ray.init("local", num_cpus=8, num_gpus=1, include_dashboard=False, _temp_dir=folder, runtime_env=environment)
    config = recipe.actor_rollout_ref.rollout
    trainer = ray.remote(Rank).options(num_gpus=1).remote(config, str(world.model))
    replica = RolloutReplicaRegistry.get("vllm")(0, config, HFModelConfig(path=str(world.model)), gpus_per_node=1)
    await replica.init_hybrid(SimpleNamespace(workers=[trainer]))
    yield Pair(recipe, replica, trainer)
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def tokenizer(world: World) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(world.model)


async def test_log_probs_are_the_trainers_after_every_update(pair: Pair, record_property):
    stale = None
    for _ in range(3):
        await pair.update()
        outputs = await asyncio.gather(*(pair.generate(prompt, SAMPLED) for prompt in PROMPTS))
        found = [await pair.difference(*both) for both in zip(PROMPTS, outputs, strict=True)]
        record_property("log_probs", max(found))
        assert max(found) < BOUND
        assert {output.extra_fields["global_steps"] for output in outputs} == {pair.steps}
        if stale:  # what the step before gave: weights that stayed behind would show
            assert await pair.difference(*stale) > 20 * BOUND
        stale = PROMPTS[0], outputs[0]


async def test_it_stops_at_a_string_over_several_tokens_and_keeps_it(pair: Pair, tokenizer):
    await pair.update()
    free = (await pair.generate(PROMPTS[0], GREEDY)).token_ids
    stop = tokenizer.decode(free[5:8])
    stopped = await pair.generate(PROMPTS[0], {**GREEDY, "stop": [stop], "include_stop_str_in_output": True})
    text = tokenizer.decode(stopped.token_ids)
    assert text.endswith(stop) and text.count(stop) == 1
    assert stopped.token_ids == free[: len(stopped.token_ids)] and len(stopped.log_probs) == len(stopped.token_ids)


async def test_an_abort_ends_what_runs_keeps_its_tokens_and_later_requests_are_served(pair: Pair):
    await pair.update()
    long = {**SAMPLED, "max_tokens": 900}
    running = [asyncio.ensure_future(pair.generate(prompt, long)) for prompt in PROMPTS]
    await pair.running(at_least=8)
    assert (await pair.replica.abort_all_requests())["aborted_count"] == len(PROMPTS)
    outputs = await asyncio.gather(*running)
    assert all(output.stop_reason == "aborted" and len(output.token_ids) < 900 for output in outputs)
    kept = [(prompt, output) for prompt, output in zip(PROMPTS, outputs, strict=True) if output.token_ids]
    assert kept and max([await pair.difference(*both) for both in kept]) < BOUND
    await pair.replica.resume_generation()
    await pair.update()
    after = await pair.generate(PROMPTS[1], SAMPLED)
    assert after.stop_reason == "completed" and await pair.difference(PROMPTS[1], after) < BOUND


async def test_an_aborted_trajectory_says_so(pair: Pair, tokenizer):
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from rltr_verl.rollout.planner_loop import PlannerLoop

    config = pair.config.copy()
    config.data.max_response_length = 800
    loop = PlannerLoop(DictConfigWrap(config), pair, tokenizer, None, None, DictConfigWrap(config.data))
    row = {"raw_prompt": [{"role": "user", "content": "How warm is Arlen?"}]}
    never = {tokenizer.convert_tokens_to_ids(text): -100 for text in ("<answer>", "<|im_end|>")}
    endless = {"temperature": 1.0, "logprobs": True, "logit_bias": never}
    running = asyncio.ensure_future(loop.run(endless, **row))
    await pair.running(at_least=2)
    await pair.replica.abort_all_requests()
    output = await running
    await pair.replica.resume_generation()
    assert Trajectory.from_dict(json.loads(output.extra_fields[TRAJECTORY_FIELD])).end == "aborted"
    assert set(output.response_mask) == {1} and len(output.response_mask) == len(output.response_ids) < 800
