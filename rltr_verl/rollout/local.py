"""Rollouts in this process, without verl and Ray: the same turns, parser, tools and engine as in training.

For evaluation and for looking at a model before and after training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rltr_verl.config import RltrSettings
from rltr_verl.errors import ModelError, RolloutError
from rltr_verl.parsing import STOP_MARKER
from rltr_verl.rollout.generation import Completion, Engine, EngineLimits
from rltr_verl.rollout.sampling import SamplingParams
from rltr_verl.rollout.turns import Planner, Rollout, SampledIds, query_of, take_turns
from rltr_verl.rows import read_messages
from rltr_verl.trajectory import Trajectory

Row = Mapping[str, Any]


@dataclass(frozen=True)
class LocalSampling:
    """How tokens are drawn.

    temperature: 0 is greedy. max_tokens: room behind the prompt, observations included.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 192


class LocalModel:
    """A model folder ready to roll out, on a GPU if there is one.

    Args:
        folder: Hugging Face model folder with a tokenizer.
        settings: tools and limits of the rollout.
        template_kwargs: further arguments of the chat template.

    Raises:
        ModelError: the folder holds no model, or one the engine cannot run exactly.
        ConfigError: the settings name an unknown tool.
    """

    def __init__(
        self, folder: str | Path, settings: RltrSettings, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer, model = _load(Path(folder), "auto" if device == "cuda" else torch.float32)
        self._model = model.to(device)
        self.planner = Planner.build(settings, self.tokenizer, template_kwargs)

    def roll_out(
        self,
        rows: Sequence[Row],
        sampling: LocalSampling | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> list[Trajectory]:
        """One trajectory per row, in order; the same rows, weights and seed give the same trajectories.

        Args:
            rows: each with ``prompt`` (chat messages) and ``extra_info``.
            sampling: see :class:`LocalSampling`; greedy if None.
            on_done: called whenever a trajectory has ended.
        """
        return asyncio.run(self._roll_out(rows, sampling or LocalSampling(), on_done))

    async def _roll_out(
        self, rows: Sequence[Row], sampling: LocalSampling, on_done: Callable[[], None] | None
    ) -> list[Trajectory]:
        prompts = [self._prompt(row) for row in rows]
        longest = max((len(ids) for ids, _ in prompts), default=0)
        limits = EngineLimits(max_model_len=longest + sampling.max_tokens + 1)
        engine = Engine(self._model, self.tokenizer, limits, self.planner.template.eos_ids, seed=sampling.seed)
        served = _Served(engine, sampling)

        async def one(index: int) -> Trajectory:
            ids, shown = prompts[index]
            rollout = Rollout(ids, sampling.max_tokens)
            await take_turns(
                self.planner, rollout, served.generator(f"row {index}"), list(shown), rows[index].get("extra_info")
            )
            if on_done:
                on_done()
            return rollout.trajectory(query_of(list(rows[index]["prompt"]), rows[index].get("extra_info")), shown)

        return await served.run([one(index) for index in range(len(rows))])

    def _prompt(self, row: Row) -> tuple[list[int], dict[str, dict[str, Any]]]:
        shown = self.planner.shown(row.get("extra_info"))
        return self.planner.template.prompt_ids(read_messages(row["prompt"]), list(shown.values())), shown


class _Served:
    """Steps an engine whenever a trajectory waits for tokens."""

    def __init__(self, engine: Engine, sampling: LocalSampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._wake = asyncio.Event()

    def generator(self, request_id: str) -> Callable[[list[int], int], Any]:
        """A ``generate`` for one trajectory; the id and the turn's length seed its draws."""

        async def generate(ids: list[int], max_tokens: int) -> SampledIds:
            done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
            params = SamplingParams(
                max_tokens=max_tokens,
                temperature=self._sampling.temperature,
                top_p=self._sampling.top_p,
                stop=(STOP_MARKER,),
            )
            self._engine.add(request_id, ids, params, done.set_result)
            self._wake.set()
            completion = await done
            aborted = "aborted" if completion.finish_reason == "abort" else "completed"
            return SampledIds(completion.token_ids, completion.log_probs, aborted)

        return generate

    async def run(self, trajectories: Sequence[Any]) -> list[Trajectory]:
        """Drive the engine until all trajectories have ended; an engine's or trajectory's error ends them all."""
        pump = asyncio.ensure_future(self._pump())
        together = asyncio.ensure_future(asyncio.gather(*trajectories))
        try:
            await asyncio.wait({pump, together}, return_when=asyncio.FIRST_COMPLETED)
            if not together.done():
                raise RolloutError("the engine ended early", fix="see the error above this one.") from pump.exception()
            return list(together.result())
        finally:
            for task in (pump, together):
                task.cancel()

    async def _pump(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._engine.has_work:
                self._engine.step()
                await asyncio.sleep(0)  # the trajectories take up what was finished


def _load(folder: Path, dtype: Any) -> tuple[Any, Any]:
    """Tokenizer and model of a folder."""
    if not (folder / "config.json").is_file():
        fix = "give a Hugging Face model folder, for example <verl checkpoint>/huggingface."
        raise ModelError("no model here (config.json is missing)", where=str(folder), fix=fix)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return tokenizer, AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"the model cannot be loaded ({reason})", where=str(folder), fix="save it again.") from None
