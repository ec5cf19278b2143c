"""The server in this process: what verl's client and trainer ask of it, through its real methods and its HTTP port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from verl.utils.profiler.config import ProfilerConfig, TorchProfilerToolConfig
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, RolloutReplicaRegistry

from rltr_verl.errors import ConfigError, RolloutError
from rltr_verl.rollout.registration import NAME, register_adapter, register_replica
from rltr_verl.rollout.transformers_server import TransformersReplica, TransformersServer
from rltr_verl.rollout.weight_transfer import pack

GREEDY = {"temperature": 0.0, "logprobs": True, "ignore_eos": True}


def _config(**settings: Any) -> RolloutConfig:
    base = {
        "name": NAME,
        "tensor_model_parallel_size": 1,
        "prompt_length": 200,
        "response_length": 32,
        "dtype": "float32",
        "load_format": "auto",
    }
    return RolloutConfig(**{**base, **settings})


async def _launch(folder: Path, **settings: Any) -> TransformersServer:
    model_config = HFModelConfig(path=str(folder))
    server = TransformersServer(_config(**settings), model_config, RolloutMode.HYBRID, 0, "")
    await server.launch_server()
    return server


async def _stop(server: TransformersServer) -> None:
    for task in server._tasks:
        task.cancel()
    await asyncio.gather(*server._tasks, return_exceptions=True)


@pytest_asyncio.fixture
async def server(tiny_folder: Path) -> AsyncIterator[TransformersServer]:
    started = await _launch(tiny_folder)
    yield started
    await _stop(started)


async def test_generate_answers_as_verl_expects(
    server: TransformersServer, make_model: Callable[[], Any], plain_log_probs: Callable[..., list[float]]
) -> None:
    await server.set_global_steps(3)
    params = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    prompt = list(range(40))
    outputs = await asyncio.gather(*[server.generate(prompt, dict(params), f"r{i}") for i in range(6)])
    for output in outputs:
        assert output.stop_reason == "completed"
        assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"] == 3
        assert 1 <= len(output.token_ids) <= 32
        expected = plain_log_probs(make_model(), prompt, output.token_ids, 0.8)
        assert output.log_probs == pytest.approx(expected, abs=1e-4)
    assert len({tuple(output.token_ids) for output in outputs}) > 1
    assert sum(output.extra_fields["num_cached_tokens"] for output in outputs) == 5 * 39


async def test_log_probs_only_when_asked(server: TransformersServer) -> None:
    assert (await server.generate([1, 2], {**GREEDY, "logprobs": False}, "r")).log_probs is None


async def test_most_tokens_without_a_request_are_verls_budget(server: TransformersServer) -> None:
    """response_length, less what a prompt beyond prompt_length takes from it; never less than one token."""
    assert len((await server.generate([5] * 10, dict(GREEDY), "a")).token_ids) == 32
    assert len((await server.generate([5] * 220, dict(GREEDY), "b")).token_ids) == 12
    assert len((await server.generate([5] * 231, {**GREEDY, "max_tokens": 50}, "c")).token_ids) == 1


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"image_data": [b"x"]}, "image"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"prompt_ids": [1] * 240}, "room"),
        ({"sampling_params": {"best_of": 2}}, "best_of"),
    ],
)
async def test_what_it_cannot_do_is_refused(server: TransformersServer, settings: dict, problem: str) -> None:
    request = {"prompt_ids": [1, 2, 3], "sampling_params": dict(GREEDY), "request_id": "r", **settings}
    with pytest.raises(ConfigError, match=problem):
        await server.generate(**request)


async def _begin(server: TransformersServer, n: int = 4) -> list[asyncio.Task]:
    """Start ``n`` requests of 32 tokens and return when each has a few."""
    target = (await server.get_status())["tokens_sampled"] + 5 * n
    tasks = [asyncio.create_task(server.generate([7, i], dict(GREEDY), f"r{i}")) for i in range(n)]
    while (await server.get_status())["tokens_sampled"] < target:
        await asyncio.sleep(0)
    return tasks


async def _no_token_is_drawn(server: TransformersServer) -> None:
    """The engine runs in this loop, so that each turn of it is room for a step."""
    drawn = (await server.get_status())["tokens_sampled"]
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert (await server.get_status())["tokens_sampled"] == drawn


async def test_abort_resume(server: TransformersServer) -> None:
    whole = await server.generate([7, 0], dict(GREEDY), "whole")
    tasks = await _begin(server, 4)
    report = await server.abort_all_requests()
    assert report["aborted_count"] == 4
    parts = await asyncio.gather(*tasks)
    assert all(part.stop_reason == "aborted" and 0 < len(part.token_ids) < 32 for part in parts)
    late = asyncio.create_task(server.generate([7, 0, *parts[0].token_ids], dict(GREEDY), "late"))
    await _no_token_is_drawn(server)
    assert not late.done()
    await server.resume_generation()
    resumed = await late
    assert (parts[0].token_ids + resumed.token_ids)[:32] == whole.token_ids


async def test_a_leaving_replica_rejects_instead_of_holding(server: TransformersServer) -> None:
    await server.abort_all_requests(reject_request=True)
    output = await server.generate([1, 2], dict(GREEDY), "r")
    assert (output.token_ids, output.stop_reason) == ([], "aborted")
    await server.abort_all_requests()  # a plain abort restores waiting
    waiting = asyncio.create_task(server.generate([1, 2], dict(GREEDY), "r"))
    await _no_token_is_drawn(server)
    assert not waiting.done()
    await server.resume_generation()
    assert (await waiting).stop_reason == "completed"


async def test_one_request_can_be_aborted_or_cancelled(server: TransformersServer) -> None:
    tasks = await _begin(server, 3)
    assert (await server.abort_request("r1"))["aborted"]
    tasks[2].cancel()
    first, second = await asyncio.gather(*tasks[:2])
    assert (first.stop_reason, second.stop_reason) == ("completed", "aborted")
    assert (await server.get_status())["unfinished"] == 0


async def test_sleep_waits_for_running_requests_and_frees_the_cache(server: TransformersServer) -> None:
    tasks = await _begin(server, 2)
    await server.sleep()
    assert all(output.stop_reason == "completed" for output in await asyncio.gather(*tasks))
    assert (await server.get_status())["cache_bytes"] == 0
    later = asyncio.create_task(server.generate([7, 0], dict(GREEDY), "later"))
    await _no_token_is_drawn(server)
    assert not later.done()
    await server.wake_up(tags=["weights"])
    await server.wake_up(tags=["kv_cache"])
    assert (await later).token_ids == tasks[0].result().token_ids


def _trained(model: Any) -> list[tuple[str, torch.Tensor]]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return list(model.state_dict().items())


async def test_no_token_is_drawn_while_an_update_is_under_way(
    server: TransformersServer, make_model: Callable[[], Any], plain_log_probs: Callable[..., list[float]]
) -> None:
    model = make_model()
    packed = [pack(name, tensor) for name, tensor in _trained(model)]
    tasks = await _begin(server, 2)
    await server.update_weights_bucket(packed[:4])
    await _no_token_is_drawn(server)
    await server.update_weights_bucket(packed[4:], last=True, global_steps=9)
    for i, output in enumerate(await asyncio.gather(*tasks)):
        fields = output.extra_fields
        assert (fields["min_global_steps"], fields["max_global_steps"]) == (None, 9)
        expected = plain_log_probs(model, [7, i], output.token_ids)
        assert output.log_probs[-10:] == pytest.approx(expected[-10:], abs=1e-4)


async def test_a_failed_pass_fails_its_requests_and_the_server_goes_on(server: TransformersServer) -> None:
    assert server.engine is not None
    weight = server.engine.model.lm_head.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(RolloutError, match="not numbers"):
        await server.generate([1, 2, 3], dict(GREEDY), "r")
    with torch.no_grad():
        weight.copy_(kept)
    assert (await server.generate([1, 2, 3], dict(GREEDY), "r")).stop_reason == "completed"


async def test_chat_completions_over_http(server: TransformersServer, tokenizer: Any) -> None:
    host, port = await server.get_server_address()
    messages = [{"role": "user", "content": "call calc"}]
    async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
        body = {"model": "any", "messages": messages, "temperature": 0, "max_tokens": 6}
        answer = await (await client.post("/v1/chat/completions", json=body)).json()
        refused = await client.post("/v1/chat/completions", json={**body, "logit_bias": {}})
        health = await client.get("/health")
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    expected = await server.generate(prompt, {"temperature": 0, "max_tokens": 6}, "r")
    text = tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert refused.status == 422
    assert health.status == 200


async def test_a_profile_is_written_where_verl_says(tiny_folder: Path, tmp_path: Path) -> None:
    tools = {"torch": TorchProfilerToolConfig(discrete=True)}
    profiler = ProfilerConfig(tool="torch", enable=True, ranks=[0], save_path=str(tmp_path), tool_config=tools)
    server = await _launch(tiny_folder, profiler=profiler)
    await server.start_profile()
    await server.generate([1, 2, 3], dict(GREEDY), "r")
    await server.stop_profile()
    await _stop(server)
    assert "scaled_dot_product" in (tmp_path / "rollout_0_0.json").read_text()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [({"max_model_len": 1000}, "positions for 512"), ({"engine_kwargs": {NAME: {"kv_mb": 3}}}, "kv_mb")],
)
async def test_settings_that_cannot_work_are_refused(tiny_folder: Path, settings: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        await _launch(tiny_folder, **settings)


def test_a_replica_is_not_split() -> None:
    with pytest.raises(ConfigError, match="tensor_model_parallel_size"):
        TransformersReplica(0, _config(tensor_model_parallel_size=2), None)


def test_verl_finds_replica_and_adapter() -> None:
    from verl.workers.rollout.base import get_rollout_class

    from rltr_verl.rollout.transformers_adapter import TransformersServerAdapter

    register_replica()
    register_adapter()
    assert RolloutReplicaRegistry.get(NAME) is TransformersReplica
    assert get_rollout_class(NAME) is TransformersServerAdapter
