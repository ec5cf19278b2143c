"""Tokens a second of the rollout engine beside plain Hugging Face ``generate``, from one run.

    OMP_NUM_THREADS=1 python benchmarks/rollout_server.py [--model FOLDER] [--device cuda] [--json FILE] [--vllm]

Every contender gets the same prompts (100-200 tokens) and must produce the same number of tokens per request (4-40,
ragged). Each figure is the median of ``--rounds`` rounds; contenders take turns within a round, so that a machine that
slows down slows them all. "sequential" is what a loop over requests gives: one ``generate`` call after another.
"batched" is one padded ``generate`` call that runs to the longest request; only tokens that were asked for count.

The last line is the rollout part of a small training step: 8 queries x 8 samples, 3 turns of 8 tokens with a 25-token
observation between them and a common system prompt.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rltr_verl.rollout.generation import Engine, EngineLimits
from rltr_verl.rollout.sampling import SamplingParams

BATCHES = (1, 16, 64)
Work = list[tuple[list[int], int]]  # prompt, number of tokens to produce


def main() -> None:
    args = _arguments()
    torch.manual_seed(0)
    model, plain = (_load(args.model).to(args.device).eval() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    engine = Engine(model, None, EngineLimits(max_model_len=1024))
    contenders: dict[str, Callable[[Work], None]] = {
        "engine": lambda work: run_engine(engine, work),
        "generate, sequential": lambda work: run_sequential(plain, work),
        "generate, batched": lambda work: run_batched(plain, work),
    }
    if args.vllm:
        contenders["vllm"] = vllm_runner(args.model)
    rates = {batch: measure(contenders, workload(batch, plain.config.vocab_size), args.rounds) for batch in BATCHES}
    step = statistics.median(agent_step(engine, plain.config.vocab_size, seed) for seed in range(args.rounds))
    report(rates, step, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; without it a random Qwen3 of the quickstart's size")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--vllm", action="store_true", help="also run vLLM on the same work (needs --model)")
    args = parser.parse_args()
    if args.vllm and (args.model is None or importlib.util.find_spec("vllm") is None):
        parser.error("--vllm needs an installed vllm and --model FOLDER")
    return args


def _load(folder: str | None) -> Any:
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=1000, tie_word_embeddings=True, **sizes, **heads))


def workload(n: int, n_vocab: int, seed: int = 0) -> Work:
    """``n`` ragged requests, or 8 that come one after another if ``n`` is 1."""
    draw = random.Random(seed)
    return [
        ([draw.randrange(n_vocab) for _ in range(draw.randint(100, 200))], draw.randint(4, 40))
        for _ in range(n if n > 1 else 8)
    ]


def run_engine(engine: Engine, work: Work) -> None:
    """All requests at once, without anything kept from the round before."""
    engine.clear_prefix_cache()
    for i, (prompt, n_tokens) in enumerate(work):
        params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
        engine.add(str(i), prompt, params, lambda completion: None)
    while engine.has_work:
        engine.step()


def run_sequential(model: Any, work: Work) -> None:
    """One ``generate`` call a request."""
    for prompt, n_tokens in work:
        ids = torch.tensor([prompt], device=model.device)
        _generate(model, ids, torch.ones_like(ids), n_tokens)


def run_batched(model: Any, work: Work) -> None:
    """One ``generate`` call for all, padded on the left."""
    width = max(len(prompt) for prompt, _ in work)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in work], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in work], device=model.device)
    _generate(model, ids, mask, max(n_tokens for _, n_tokens in work))


def _generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, n_tokens: int) -> None:
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=n_tokens,
            min_new_tokens=n_tokens,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            eos_token_id=None,
        )


def vllm_runner(folder: str) -> Callable[[Work], None]:
    """vLLM's offline engine on the same folder."""
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    llm = LLM(folder, dtype="float32", max_model_len=1024, enforce_eager=True, enable_prefix_caching=False)

    def run(work: Work) -> None:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        params = [VllmParams(max_tokens=n, ignore_eos=True, detokenize=False) for _, n in work]
        llm.generate(prompts, params, use_tqdm=False)

    return run


def measure(contenders: dict[str, Callable[[Work], None]], work: Work, rounds: int) -> dict[str, float]:
    """Median tokens a second of each contender; one untimed round first.

    The batch of 1 is several requests, each answered by every contender before the next one comes.
    """
    parts = [[item] for item in work] if len(work) < BATCHES[1] else [work]
    seconds: dict[str, list[float]] = {name: [0.0] * (rounds + 1) for name in contenders}
    for turn in range(rounds + 1):
        for part in parts:
            for name, run in contenders.items():
                start = time.perf_counter()
                run(part)
                seconds[name][turn] += time.perf_counter() - start
    n_tokens = sum(n for _, n in work)
    return {name: n_tokens / statistics.median(times[1:]) for name, times in seconds.items()}


def agent_step(engine: Engine, n_vocab: int, seed: int, n_turns: int = 3) -> float:
    """Seconds for 64 trajectories of ``n_turns`` turns."""
    draw = random.Random(seed)
    engine.clear_prefix_cache()
    system = [draw.randrange(n_vocab) for _ in range(120)]
    queries = [[draw.randrange(n_vocab) for _ in range(30)] for _ in range(8)]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    start = time.perf_counter()

    def begin(name: str, prompt: list[int], turns_left: int) -> None:
        def on_done(completion: Any) -> None:
            if turns_left > 1:
                observation = [draw.randrange(n_vocab) for _ in range(25)]
                begin(name, prompt + completion.token_ids + observation, turns_left - 1)

        engine.add(f"{seed}-{name}-{turns_left}", prompt, params, on_done)

    for i in range(64):
        begin(str(i), system + queries[i // 8], n_turns)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def report(rates: dict[int, dict[str, float]], step: float, args: argparse.Namespace) -> None:
    """Print the table; write the JSON if asked."""
    names = list(next(iter(rates.values())))
    table = Table(title=f"tokens a second, {args.device}, {torch.get_num_threads()} thread(s)")
    for column in ("requests at once", *names, *(f"engine / {name}" for name in names[1:])):
        table.add_column(column, justify="right")
    for batch, rate in rates.items():
        ratios = [f"{rate['engine'] / rate[name]:.2f}x" for name in names[1:]]
        table.add_row(str(batch), *(f"{rate[name]:.0f}" for name in names), *ratios)
    console = Console(width=140)
    console.print(table)
    console.print(f"rollout of a step, 64 trajectories x 3 turns: {step:.3f} s")
    if args.json:
        figures = {"tokens_per_second": rates, "rollout_of_a_step_seconds": step, "device": args.device}
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
