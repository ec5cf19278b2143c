"""The rollout engine ``transformers`` as verl sees it: a Ray actor that serves one replica, and the replica.

One asyncio loop does everything. Between two forward passes it takes in what has arrived: requests, weights, control
calls. Nothing is ever changed during a pass, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import torch
from transformers import AutoModelForCausalLM
from verl.plugin.platform import get_platform
from verl.utils import normalize_token_ids
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name, get_resource_name, get_torch_device, get_visible_devices_keyword
from verl.utils.net_utils import is_valid_ipv6_address
from verl.utils.profiler import build_rollout_dist_profiler
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput
from verl.workers.rollout.utils import get_max_position_embeddings, run_uvicorn

from rltr_verl.errors import ConfigError
from rltr_verl.rollout.generation import Completion, Engine, EngineLimits
from rltr_verl.rollout.registration import NAME
from rltr_verl.rollout.sampling import SamplingParams
from rltr_verl.rollout.transformers_adapter import server_name
from rltr_verl.rollout.weight_transfer import PackedTensor, unpack

logger = logging.getLogger(__name__)

# rollout.engine_kwargs.transformers: what verl's own rollout settings have no name for.
_ENGINE_KWARGS = {"kv_cache_mb": 4096, "prefix_cache_mb": 1024, "num_threads": None}


class TransformersServer:
    """Serves one replica. Made a Ray actor by ``TransformersReplica``; the methods are those verl calls on a server.

    Args:
        config: rollout settings, model_config: the model to serve, as verl hands them over.
        rollout_mode: hybrid servers get their weights from the trainer, the others keep what they load.
        replica_rank: number of the replica.
        visible_devices: the accelerators this process may use, as the platform's environment variable takes them.
    """

    def __init__(
        self,
        config: Any,
        model_config: Any,
        rollout_mode: RolloutMode,
        replica_rank: int,
        visible_devices: str,
    ) -> None:
        os.environ[get_visible_devices_keyword()] = visible_devices
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.rollout_mode = rollout_mode
        self.replica_rank = replica_rank
        self._options = _engine_options(self.config)
        if self._options["num_threads"]:
            torch.set_num_threads(int(self._options["num_threads"]))
        self.device = torch.device(get_device_name())
        self.engine: Engine | None = None
        self._port: int | None = None
        self._work = asyncio.Event()
        # Passes run only while all of these are set.
        self._weights_whole = _set_event()
        self._awake = _set_event()
        # Requests enter only while this is set; see abort_all_requests.
        self._admitting = _set_event()
        self._rejecting = False
        self._failure: Exception | None = None  # set while the requests of a failed pass are ended
        self._tasks: set[asyncio.Task] = set()
        self._profiler: Any = None
        self._n_traces = 0
        self._profile_control = _profile_control(self.config, replica_rank)

    # ---- life -----------------------------------------------------------------------------------------------------

    async def launch_server(self) -> None:
        """Load the model, check that the engine reproduces it, start to serve."""
        from rltr_verl.rollout.openai_api import build_app

        limits = _engine_limits(self.config, self.model_config.hf_config, self._options)
        self.engine = Engine(
            load_model(self.config, self.model_config, self.device),
            self.model_config.tokenizer,
            limits,
            eos_token_ids=_eos_token_ids(self.model_config),
            seed=self.replica_rank + self.config.seed,
        )
        self._start(self._run())
        app = build_app(self, self.model_config.tokenizer, self.model_config.path)
        self._port, task = await run_uvicorn(app, None, self._address)
        self._tasks.add(task)

    def _start(self, coroutine: Any) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(coroutine))

    @property
    def _address(self) -> str:
        return ray.util.get_node_ip_address().strip("[]")

    async def get_server_address(self) -> tuple[str, int]:
        """Address and port of the HTTP endpoint."""
        assert self._port is not None, "launch_server comes first"
        return self._address, self._port

    @property
    def _running(self) -> Engine:
        assert self.engine is not None, "launch_server comes first"
        return self.engine

    async def _run(self) -> None:
        engine = self._running
        while True:
            await self._work.wait()
            await self._weights_whole.wait()
            await self._awake.wait()
            try:
                engine.step()
            except Exception as error:  # whatever it is, those who wait for an answer must hear of it
                logger.exception("a forward pass of the transformers rollout failed; its requests fail with it")
                self._fail_all(error)
            if not engine.has_work:
                self._work.clear()
            await asyncio.sleep(0)  # let the loop take in what arrived meanwhile

    def _fail_all(self, error: Exception) -> None:
        self._failure = error
        self._running.abort_all()
        self._failure = None

    # ---- generation -----------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        priority: int = 0,
        **unsupported: Any,
    ) -> TokenOutput:
        """Token ids in, token ids out.

        Args:
            prompt_ids: the whole context; what an earlier request left in the cache is reused.
            sampling_params: vLLM's names, see ``SamplingParams``.
            request_id: without ``seed`` among the parameters it decides the draw.
            priority: accepted for compatibility; requests are served in order of arrival.

        Returns:
            ``stop_reason`` is ``completed`` or ``aborted``; ``extra_fields`` hold ``global_steps`` of the last token,
            ``min_global_steps``, ``max_global_steps``, ``num_cached_tokens`` and ``finish_reason``.

        Raises:
            ConfigError: a parameter the engine has not, a prompt that leaves no room, images or videos.
        """
        _refuse_other_inputs(image=image_data, video=video_data, **unsupported)
        prompt = normalize_token_ids(prompt_ids)
        params = SamplingParams.from_request(*self._with_room(dict(sampling_params), len(prompt)))
        while not self._admitting.is_set():
            if self._rejecting:
                return self._output(_nothing(self._running.version), params)
            await self._admitting.wait()
        return self._output(await self._complete(request_id, prompt, params), params)

    def _with_room(self, request: dict[str, Any], n_prompt: int) -> tuple[dict[str, Any], int]:
        """The request and the most tokens it may add: what it asks, or the response length; at least one."""
        room = self.config.response_length
        default = min(room, self.config.prompt_length + room - n_prompt)
        asked = [request.pop(key) for key in ("max_new_tokens", "max_tokens") if request.get(key) is not None]
        return request, max(1, asked[-1] if asked else default)

    async def _complete(self, request_id: str, prompt: list[int], params: SamplingParams) -> Completion:
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def on_done(completion: Completion) -> None:
            if done.done():
                return
            if self._failure is not None:
                done.set_exception(self._failure)
            else:
                done.set_result(completion)

        self._running.add(request_id, prompt, params, on_done)
        self._work.set()
        try:
            return await done
        except asyncio.CancelledError:
            self._running.abort(request_id)
            raise

    def _output(self, completion: Completion, params: SamplingParams) -> TokenOutput:
        return TokenOutput(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs if params.logprobs else None,
            stop_reason="aborted" if completion.finish_reason == "abort" else "completed",
            extra_fields={
                "global_steps": completion.last_version,
                "min_global_steps": completion.first_version,
                "max_global_steps": completion.last_version,
                "num_cached_tokens": completion.n_reused,
                "finish_reason": completion.finish_reason,
            },
        )

    # ---- control --------------------------------------------------------------------------------------------------

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """End every request with what it has, and admit none until ``resume_generation``.

        Requests that come meanwhile wait, or with ``reject_request`` return at once as aborted (the replica is about
        to leave the load balancer; nobody would resume them).
        """
        self._rejecting = reject_request
        self._admitting.clear()
        ids = self._running.abort_all()
        if reset_prefix_cache:
            self._running.clear_prefix_cache()
        return {"aborted_count": len(ids), "request_ids": ids}

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End one request with what it has."""
        return {"aborted": self._running.abort(request_id), "request_id": request_id}

    async def resume_generation(self) -> None:
        """Admit requests again."""
        self._rejecting = False
        self._admitting.set()

    async def sleep(self) -> None:
        """Free the device for the trainer, once running requests are through. Does nothing in standalone mode."""
        if not self.config.free_cache_engine or self.rollout_mode == RolloutMode.STANDALONE:
            return
        await self._drain()
        self._awake.clear()
        self._running.release_kv_cache()
        self._move("cpu")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Undo ``sleep``, in one go or one of ``weights`` and ``kv_cache`` at a time."""
        if tags is None or "weights" in tags:
            self._move(self.device)
        if tags is None or "kv_cache" in tags:
            self._awake.set()

    def _move(self, device: torch.device | str) -> None:
        if self.device.type != "cpu":
            self._running.model.to(device)
            get_torch_device().empty_cache()

    async def _drain(self) -> None:
        while self._running.has_work and self._awake.is_set():
            await asyncio.sleep(0.005)

    async def wait_for_requests_to_drain(self) -> None:
        """Return once no request is unfinished."""
        await self._drain()

    async def clear_kv_cache(self) -> None:
        """Forget the keys and values of finished sequences."""
        self._running.clear_prefix_cache()

    async def release_kv_cache(self) -> None:
        """Give the memory of keys and values back while weights are exchanged."""
        self._running.release_kv_cache()

    async def resume_kv_cache(self) -> None:
        """Do nothing: memory is taken again when it is needed."""

    async def update_weights_bucket(
        self, bucket: list[PackedTensor], last: bool = False, global_steps: int | None = None
    ) -> None:
        """Take in a part of an update; no pass runs from the first part to the last.

        Raises RolloutError if a weight does not fit or, with ``last``, if one did not come.
        """
        self._weights_whole.clear()
        self._running.load_weights(map(unpack, bucket))
        if last:
            self._running.finish_weights(global_steps)
            self._weights_whole.set()

    async def set_global_steps(self, global_steps: int) -> None:
        """Name the version of the weights."""
        self._running.version = global_steps

    async def get_status(self) -> dict[str, Any]:
        """Counters, for benchmarks and monitoring."""
        engine = self._running
        return {
            "global_steps": engine.version,
            "unfinished": len(engine.request_ids),
            "tokens_sampled": engine.n_tokens_sampled,
            "tokens_computed": engine.n_tokens_computed,
            "cache_bytes": engine.cache_nbytes,
        }

    # ---- profiling ------------------------------------------------------------------------------------------------

    def _should_profile(self) -> bool:
        control = self._profile_control
        return bool(control.check_enable() and control.check_this_rank() and control.is_discrete_mode())

    async def start_profile(self, **kwargs: Any) -> None:
        """Start a torch profile, if the profiler settings choose this replica."""
        if self._should_profile() and self._profiler is None:
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    async def stop_profile(self) -> None:
        """Write the profile as a Chrome trace into the profiler's ``save_path``."""
        if self._profiler is None:
            return
        self._profiler.stop()
        folder = Path(str(self._profile_control.config.save_path))
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(folder / f"rollout_{self.replica_rank}_{self._n_traces}.json"))
        self._profiler, self._n_traces = None, self._n_traces + 1


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


def _profile_control(config: RolloutConfig, replica_rank: int) -> Any:
    """verl's decision on who is profiled when; of its tools this server has torch's profiler."""
    profiler = config.profiler
    if profiler is None or profiler.tool != "torch":
        return build_rollout_dist_profiler(replica_rank, 1)
    tool = omega_conf_to_dataclass((profiler.tool_config or {}).get("torch") or {})
    return build_rollout_dist_profiler(replica_rank, 1, config=profiler, tool_config=tool)


def _nothing(version: int | None) -> Completion:
    return Completion([], [], "abort", 0, version, version)


def _refuse_other_inputs(**inputs: Any) -> None:
    given = sorted(name for name, value in inputs.items() if value is not None)
    if given:
        raise ConfigError(
            f"the transformers rollout takes token ids only, not {given}",
            where="actor_rollout_ref.rollout.name",
            fix="use rollout.name=vllm or sglang for multi-modal models",
        )


def _engine_options(config: RolloutConfig) -> dict[str, Any]:
    given = dict((config.engine_kwargs or {}).get(NAME) or {})
    unknown = sorted(set(given) - set(_ENGINE_KWARGS))
    if unknown:
        raise ConfigError(
            f"unknown setting {unknown}",
            where=f"rollout.engine_kwargs.{NAME}",
            fix=f"use only {sorted(_ENGINE_KWARGS)}",
        )
    return {**_ENGINE_KWARGS, **given}


def _engine_limits(config: RolloutConfig, hf_config: Any, options: dict[str, Any]) -> EngineLimits:
    most = get_max_position_embeddings(hf_config)
    asked = config.max_model_len or config.prompt_length + config.response_length
    if asked > most:
        raise ConfigError(
            f"{asked} tokens of context, but the model has positions for {most}",
            where="rollout.max_model_len (or prompt_length + response_length)",
            fix=f"set them to {most} or less",
        )
    return EngineLimits(
        max_model_len=asked,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        kv_cache_bytes=int(options["kv_cache_mb"]) << 20,
        prefix_cache_bytes=(int(options["prefix_cache_mb"]) << 20) if config.enable_prefix_caching else 0,
    )


def _eos_token_ids(model_config: HFModelConfig) -> set[int]:
    """Of the tokenizer, the model and its generation settings together."""
    found: set[int] = set()
    for holder in (model_config.tokenizer, model_config.hf_config, model_config.generation_config):
        ids = getattr(holder, "eos_token_id", None)
        found.update(ids if isinstance(ids, Iterable) else () if ids is None else (ids,))
    return found


def load_model(config: RolloutConfig, model_config: HFModelConfig, device: torch.device) -> Any:
    """The model in the rollout's precision; with ``load_format=dummy`` untrained, for a trainer to fill."""
    settings = {
        "dtype": PrecisionType.to_dtype(config.dtype),
        "trust_remote_code": model_config.trust_remote_code,
        "attn_implementation": "eager",  # every model has it; the engine puts its own in place
    }
    if config.load_format == "dummy":
        model = AutoModelForCausalLM.from_config(model_config.hf_config, **settings)
    else:
        model = AutoModelForCausalLM.from_pretrained(
            str(model_config.local_path), config=model_config.hf_config, **settings
        )
    return model.to(device)


class TransformersReplica(RolloutReplica):
    """One server process. Scale by the number of replicas: a replica is not split over devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_unsupported(self.config)
        self.server_class = ray.remote(TransformersServer)

    async def launch_servers(self) -> None:
        """Start the server beside the replica's worker, on the same node and the same device."""
        (worker,) = self.workers
        node_id, device_ids = await worker.__ray_call__.remote(_where)
        platform = get_platform()
        kind = "reward" if self.is_reward_model else "teacher" if self.is_teacher_model else ""
        server: Any = self.server_class.options(
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env={
                "env_vars": {**dict.fromkeys(platform.ray_noset_envvars(), "1"), **platform.rollout_env_vars()}
            },
            name=server_name(self.replica_rank, kind, self.name_suffix),
            max_concurrency=self.max_concurrency,
        ).remote(
            config=self.config,
            model_config=self.model_config,
            rollout_mode=self.rollout_mode,
            replica_rank=self.replica_rank,
            visible_devices=",".join(device_ids),
        )
        await server.launch_server.remote()
        self.servers, self._server_handle = [server], server
        host, port = await server.get_server_address.remote()
        self._server_address = f"[{host}]:{port}" if is_valid_ipv6_address(host) else f"{host}:{port}"

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End every request; see ``TransformersServer.abort_all_requests``."""
        return await self._server_handle.abort_all_requests.remote(reject_request=reject_request)

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End one request."""
        return await self._server_handle.abort_request.remote(request_id)


def _where(worker: Any) -> tuple[str, list[str]]:
    """Runs in the worker: its node, and the devices Ray gave it."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids().get(get_resource_name(), [])


def _refuse_unsupported(config: RolloutConfig) -> None:
    wanted = {
        "tensor_model_parallel_size": config.tensor_model_parallel_size != 1,
        "data_parallel_size": config.data_parallel_size != 1,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size != 1,
        "quantization": config.quantization is not None,
        "enable_rollout_routing_replay": config.enable_rollout_routing_replay,
        "disaggregation.enabled": config.disaggregation.enabled,
    }
    refused = sorted(name for name, is_wanted in wanted.items() if is_wanted)
    if refused:
        raise ConfigError(
            f"the transformers rollout has no {refused}",
            where="actor_rollout_ref.rollout",
            fix="set the sizes to 1 and the rest to their defaults, or use rollout.name=vllm",
        )
