"""Replicas as Ray actors: trainer ranks in processes of their own push weights, servers answer with them."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("VERL_PLATFORM", "cpu")

import ray
import torch
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

from rltr_verl.rollout.registration import NAME

pytestmark = pytest.mark.slow
# Actors are made of classes of this file, which worker processes cannot import by name.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

PROMPTS = [[5, 6, 7], list(range(50)), [40] * 20]
PARAMS = {"temperature": 0.9, "max_tokens": 10, "logprobs": True, "ignore_eos": True}


class Rank:
    """A trainer rank: a model of its own, one optimiser step at a time, and verl's adapter for its replica."""

    def __init__(self, folder: str, rank: int, config: RolloutConfig) -> None:
        from transformers import AutoModelForCausalLM

        from rltr_verl.rollout.transformers_adapter import TransformersServerAdapter

        os.environ["RANK"] = str(rank)
        self.rank = rank
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.adapter = TransformersServerAdapter(config, HFModelConfig(path=folder), None)

    async def train_and_push(self, step: int) -> None:
        # Ranks are trained apart, so that a weight that reached the wrong replica would show.
        generator = torch.Generator().manual_seed(100 * self.rank + step)
        ids = torch.randint(0, 250, (4, 24), generator=generator)
        self.model(ids, labels=ids).loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
        await self.adapter.update_weights(iter(self.model.state_dict().items()), global_steps=step)

    def log_probs(self, prompt: list[int], output: list[int]) -> list[float]:
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + output]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits / PARAMS["temperature"], dim=-1)
        return rows.gather(1, torch.tensor(output).unsqueeze(1))[:, 0].tolist()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="rltr-ray-", dir="/tmp")  # short: sockets live in it
    # A cluster of its own, also while another test runs one.
    ray.init("local", num_cpus=8, num_gpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _config(**settings: Any) -> RolloutConfig:
    base = {
        "name": NAME,
        "tensor_model_parallel_size": 1,
        "prompt_length": 100,
        "response_length": 32,
        "dtype": "float32",
        "n_gpus_per_node": 2,
        "checkpoint_engine": CheckpointEngineConfig(update_weights_bucket_megabytes=0),  # a bucket for every tensor
    }
    return RolloutConfig(**{**base, **settings})


def _wait_for_gpus(count: int) -> None:
    """Ray gives an ended actor's resources back a moment later, and verl asks only once."""
    deadline = time.monotonic() + 300
    while ray.available_resources().get("GPU", 0) < count:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.1)


async def _check(replica: Any, trainer: Any, step: int) -> None:
    for i, prompt in enumerate(PROMPTS):
        output = await replica.server_handle.generate.remote(
            request_id=f"{step}-{i}", prompt_ids=prompt, sampling_params=PARAMS
        )
        expected = await trainer.log_probs.remote(prompt, output.token_ids)
        assert output.log_probs == pytest.approx(expected, abs=1e-4)
        assert output.extra_fields["global_steps"] == step


def test_each_rank_feeds_its_replica_after_every_step(cluster: None, tiny_folder: Path) -> None:
    from rltr_verl.rollout.transformers_server import TransformersReplica

    config = _config(load_format="dummy")
    trainers = [
        ray.remote(Rank).options(num_gpus=1, num_cpus=1).remote(str(tiny_folder), rank, config) for rank in (0, 1)
    ]

    async def scenario() -> None:
        model_config = HFModelConfig(path=str(tiny_folder))
        replicas = [TransformersReplica(rank, config, model_config, gpus_per_node=2) for rank in (0, 1)]
        group = SimpleNamespace(workers=trainers)
        await asyncio.gather(*[replica.init_hybrid(group) for replica in replicas])
        assert len({replica.server_address for replica in replicas}) == 2
        for step in (1, 2):
            await asyncio.gather(*[trainer.train_and_push.remote(step) for trainer in trainers])
            for replica, trainer in zip(replicas, trainers, strict=True):
                await _check(replica, trainer, step)
        await asyncio.gather(*[replica.sleep() for replica in replicas])
        await asyncio.gather(*[replica.wake_up() for replica in replicas])
        assert (await replicas[0].abort_all_requests())["aborted_count"] == 0
        await replicas[0].resume_generation()
        await _check(replicas[0], trainers[0], step=2)

    try:
        asyncio.run(scenario())
    finally:
        for trainer in trainers:  # the servers went with the replicas' handles
            ray.kill(trainer)


@pytest.mark.parametrize("mode", ["standalone", "colocated"])
def test_a_replica_of_its_own_serves_the_folders_weights(cluster: None, tiny_folder: Path, mode: str) -> None:
    """As verl hosts a reward model: weights from disk, chat completions over HTTP."""
    from transformers import AutoModelForCausalLM
    from verl.single_controller.ray import RayResourcePool

    from rltr_verl.rollout.transformers_server import TransformersReplica

    model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()

    async def scenario() -> None:
        config = _config(load_format="auto", skip_tokenizer_init=False, n_gpus_per_node=1)
        replica = TransformersReplica(0, config, HFModelConfig(path=str(tiny_folder)), 1, is_reward_model=True)
        await asyncio.to_thread(_wait_for_gpus, 1)  # those of the actors ended before
        if mode == "standalone":
            await replica.init_standalone()
        else:
            await replica.init_colocated(RayResourcePool([1], use_gpu=True, max_colocate_count=2))
        output = await replica.server_handle.generate.remote(
            request_id="x", prompt_ids=[5, 6, 7], sampling_params={"temperature": 0, "max_tokens": 8}
        )
        ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.long)
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert output.token_ids == expected[0, 3:].tolist()
        for actor in (replica.server_handle, *replica.workers):
            ray.kill(actor)

    asyncio.run(scenario())
