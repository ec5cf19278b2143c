from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
)

from rltr_verl.errors import ConfigError, ModelError, RolloutError
from rltr_verl.rollout.generation import Completion, Engine, EngineLimits
from rltr_verl.rollout.sampling import SamplingParams

LIMITS = EngineLimits(max_model_len=400)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def _prompts(n: int, longest: int = 90, n_vocab: int = 250, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (n,), generator=generator).tolist()
    return [torch.randint(0, n_vocab, (length,), generator=generator).tolist() for length in lengths]


def _run(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams | list[SamplingParams], tag: str = ""
) -> list[Completion]:
    done: dict[int, Completion] = {}
    every = params if isinstance(params, list) else [params] * len(prompts)
    for i, (prompt, asked) in enumerate(zip(prompts, every, strict=True)):
        engine.add(f"{tag}{i}", prompt, asked, lambda completion, i=i: done.__setitem__(i, completion))
    while engine.has_work:
        engine.step()
    return [done[i] for i in range(len(prompts))]


@pytest.fixture
def engine(make_model: Callable[[], Any], tokenizer: Any) -> Engine:
    return Engine(make_model(), tokenizer, LIMITS, eos_token_ids=[tokenizer.eos_token_id])


@pytest.fixture
def model(make_model: Callable[[], Any]) -> Any:
    return make_model()


# ---- log-probabilities and batching ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_log_probs_match_a_plain_forward_pass(
    engine: Engine, model: Any, plain_log_probs: Callable[..., list[float]], temperature: float
) -> None:
    prompts = _prompts(20)
    params = SamplingParams(max_tokens=15, temperature=temperature, top_p=0.9, top_k=50, ignore_eos=True)
    for prompt, completion in zip(prompts, _run(engine, prompts, params), strict=True):
        assert len(completion.token_ids) == len(completion.log_probs) == 15
        expected = plain_log_probs(model, prompt, completion.token_ids, temperature)
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)


def test_a_ragged_batch_equals_hugging_face_one_by_one(engine: Engine, model: Any) -> None:
    prompts = _prompts(17)
    for prompt, completion in zip(prompts, _run(engine, prompts, GREEDY), strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)  # or generate takes the padding token, here one like any other, for padding
        expected = model.generate(
            ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


def test_requests_that_join_and_leave_midway_change_nothing(engine: Engine) -> None:
    prompts = _prompts(12, seed=3)
    params = [replace(GREEDY, max_tokens=3 + i) for i in range(12)]
    expected = [_run(engine, [prompt], p)[0].token_ids for prompt, p in zip(prompts, params, strict=True)]
    engine.clear_prefix_cache()
    done: dict[int, Completion] = {}
    for i, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(i), prompt, asked, lambda completion, i=i: done.__setitem__(i, completion))
        engine.step()
    while engine.has_work:
        engine.step()
    assert [done[i].token_ids for i in range(12)] == expected


@pytest.mark.parametrize(("budget", "rows"), [(16, 16), (33, 3), (1000, 1)])
def test_prompts_in_pieces_and_few_rows_change_nothing(
    make_model: Callable[[], Any], tokenizer: Any, engine: Engine, budget: int, rows: int
) -> None:
    small = Engine(make_model(), tokenizer, replace(LIMITS, max_batched_tokens=budget, max_num_seqs=rows))
    prompts = _prompts(9, seed=5)
    expected = [completion.token_ids for completion in _run(engine, prompts, GREEDY)]
    assert [completion.token_ids for completion in _run(small, prompts, GREEDY)] == expected


def test_the_lean_pass_and_the_models_own_give_the_same(make_model: Callable[[], Any], engine: Engine) -> None:
    own = Engine(make_model(), None, LIMITS, lean=False)
    prompts = _prompts(6, seed=16)
    for one, other in zip(_run(engine, prompts, GREEDY), _run(own, prompts, GREEDY), strict=True):
        assert one.token_ids == other.token_ids
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_half_precision(make_model: Callable[[], Any], plain_log_probs: Callable[..., list[float]]) -> None:
    model, plain = make_model().bfloat16(), make_model().bfloat16()
    engine = Engine(model, None, LIMITS)
    prompts = _prompts(5, seed=15)
    for prompt, completion in zip(prompts, _run(engine, prompts, GREEDY), strict=True):
        expected = plain_log_probs(plain, prompt, completion.token_ids)
        assert completion.log_probs == pytest.approx(expected, abs=0.15)


def _config(kind: type, **settings: Any) -> Any:
    sizes = {
        "vocab_size": 260,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
    }
    return kind(**{**sizes, **settings})


@pytest.mark.parametrize(
    "config",
    [
        _config(LlamaConfig),
        _config(MistralConfig, sliding_window=8),
        _config(Qwen2Config, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        _config(MixtralConfig, num_local_experts=4, sliding_window=None),
        GPT2Config(vocab_size=260, n_positions=256, n_embd=48, n_layer=2, n_head=4, initializer_range=0.1),
    ],
    ids=lambda config: config.model_type,
)
def test_other_architectures(config: Any, plain_log_probs: Callable[..., list[float]]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    engine = Engine(model, None, replace(LIMITS, max_model_len=200))
    prompts = _prompts(5, seed=1)
    completions = _run(engine, prompts, replace(GREEDY, temperature=1.0))
    model.set_attn_implementation("eager")
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = plain_log_probs(model, prompt, completion.token_ids)
        assert completion.log_probs == pytest.approx(expected, abs=1e-4)


def test_a_model_with_another_kind_of_attention_is_refused() -> None:
    config = _config(Gemma2Config, head_dim=12, attn_logit_softcapping=5.0)
    with pytest.raises(ModelError, match=r"softcap.*rollout.name=vllm"):
        Engine(AutoModelForCausalLM.from_config(config), None, replace(LIMITS, max_model_len=200))


def test_a_wrong_attention_does_not_pass_the_check_at_start(
    make_model: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rltr_verl.rollout import kv_cache

    right = kv_cache._mask
    monkeypatch.setattr(kv_cache, "_mask", lambda positions, *rest: right(positions - 1, *rest))
    with pytest.raises(ModelError, match="differ"):
        Engine(make_model(), None, LIMITS)


# ---- the end of a sequence ---------------------------------------------------------------------------------------


def test_stops_at_stop_ids_and_keeps_them(engine: Engine) -> None:
    prompts = _prompts(6, seed=2)
    free = [completion.token_ids for completion in _run(engine, prompts, GREEDY)]
    stop = frozenset({free[0][4], free[3][0]})
    for tokens, completion in zip(free, _run(engine, prompts, replace(GREEDY, stop_token_ids=stop)), strict=True):
        first = next((i for i, token in enumerate(tokens) if token in stop), None)
        assert completion.token_ids == (tokens if first is None else tokens[: first + 1])
        assert completion.finish_reason == ("length" if first is None else "stop")


def test_the_end_of_sequence_token_stops_unless_ignored(make_model: Callable[[], Any], tokenizer: Any) -> None:
    (prompt,) = _prompts(1, seed=2)
    free = _run(Engine(make_model(), tokenizer, LIMITS), [prompt], GREEDY)[0].token_ids
    engine = Engine(make_model(), tokenizer, LIMITS, eos_token_ids=[free[3]])
    ended, ignored = _run(engine, [prompt] * 2, [replace(GREEDY, ignore_eos=False), GREEDY])
    assert ended.token_ids == free[: free.index(free[3]) + 1]
    assert ignored.token_ids == free


def test_stops_at_stop_strings_with_all_sampled_ids(engine: Engine, tokenizer: Any) -> None:
    prompts = _prompts(8, seed=4)
    free = [completion.token_ids for completion in _run(engine, prompts, replace(GREEDY, max_tokens=40))]
    stop = tuple(tokenizer.decode(tokens[5:8])[-3:] for tokens in free[:4])
    assert all("�" not in string for string in stop), "choose another seed: the strings must be whole characters"
    stopped = 0
    for tokens, completion in zip(free, _run(engine, prompts, replace(GREEDY, max_tokens=40, stop=stop)), strict=True):
        texts = [tokenizer.decode(tokens[: n + 1]) for n in range(len(tokens))]
        first = next((n for n, text in enumerate(texts) if any(string in text for string in stop)), None)
        assert completion.token_ids == (tokens if first is None else tokens[: first + 1])
        assert (completion.stop_string is None) == (first is None)
        stopped += first is not None
    assert stopped >= 4


def test_length_is_bounded_by_the_model_too(make_model: Callable[[], Any]) -> None:
    engine = Engine(make_model(), None, replace(LIMITS, max_model_len=50))
    (completion,) = _run(engine, [[5] * 45], replace(GREEDY, max_tokens=30))
    assert len(completion.token_ids) == 5
    assert completion.finish_reason == "length"


@pytest.mark.parametrize(("prompt", "problem"), [([], "room"), ([1] * 400, "room"), ([9999], "ids outside")])
def test_impossible_prompts_are_refused(engine: Engine, prompt: list[int], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        engine.add("x", prompt, GREEDY, print)


def test_logits_that_are_not_numbers_stop_the_run(engine: Engine) -> None:
    engine.add("x", [1, 2, 3], GREEDY, lambda completion: None)
    with torch.no_grad():
        engine.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RolloutError, match="not numbers"):
        engine.step()


# ---- seeds -------------------------------------------------------------------------------------------------------


def test_a_seed_decides_the_draw_whatever_else_runs(engine: Engine) -> None:
    prompts = _prompts(6, seed=6)
    seeded = [SamplingParams(max_tokens=10, seed=i, ignore_eos=True) for i in range(6)]
    together = [completion.token_ids for completion in _run(engine, prompts, seeded)]
    alone = [_run(engine, [prompts[i]], seeded[i], tag="other")[0].token_ids for i in (3, 0, 5)]
    assert alone == [together[i] for i in (3, 0, 5)]


def test_without_a_seed_the_request_id_decides(make_model: Callable[[], Any]) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first = Engine(make_model(), None, LIMITS, seed=1)
    outputs = [completion.token_ids for completion in _run(first, [[5, 6, 7]] * 4, params)]
    assert len({tuple(tokens) for tokens in outputs}) == 4
    again = Engine(make_model(), None, LIMITS, seed=1)
    assert [completion.token_ids for completion in _run(again, [[5, 6, 7]] * 4, params)] == outputs
    other = Engine(make_model(), None, LIMITS, seed=2)
    assert [completion.token_ids for completion in _run(other, [[5, 6, 7]] * 4, params)] != outputs


# ---- reuse of keys and values ------------------------------------------------------------------------------------


def _conversation(engine: Engine, n_turns: int = 3) -> tuple[list[Completion], list[list[int]]]:
    """Turns of one trajectory: each prompt extends the one before by its output and an observation."""
    prompt, completions, prompts = _prompts(1, seed=8)[0] * 2, [], []
    for turn in range(n_turns):
        prompts.append(list(prompt))
        completions += _run(engine, [prompt], GREEDY, tag=f"turn{turn}")
        prompt = prompt + completions[-1].token_ids + [20 + turn] * 7
    return completions, prompts


def test_the_next_turn_computes_its_new_tokens_only_and_equals_a_fresh_run(
    engine: Engine, make_model: Callable[[], Any]
) -> None:
    completions, prompts = _conversation(engine)
    for turn in (1, 2):
        # everything but the last sampled token, which was never fed, and the observation
        assert completions[turn].n_reused == len(prompts[turn - 1]) + 12 - 1
    fresh = Engine(make_model(), None, replace(LIMITS, prefix_cache_bytes=0))
    expected, _ = _conversation(fresh)
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert all(c.n_reused == 0 for c in expected)
    for one, other in zip(completions, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_a_group_computes_its_common_prompt_once(engine: Engine, make_model: Callable[[], Any], tokenizer: Any) -> None:
    prompt = _prompts(1, seed=9)[0] * 3
    before = engine.n_tokens_computed
    completions = _run(engine, [prompt] * 8, SamplingParams(max_tokens=4, seed=3, ignore_eos=True))
    assert engine.n_tokens_computed - before == len(prompt) + 7 + 8 * 3
    fresh = Engine(make_model(), tokenizer, replace(LIMITS, prefix_cache_bytes=0))
    expected = _run(fresh, [prompt] * 8, SamplingParams(max_tokens=4, seed=3, ignore_eos=True))
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]


def test_a_changed_history_is_not_taken_from_the_cache(engine: Engine, make_model: Callable[[], Any]) -> None:
    prompt = list(range(60))
    _run(engine, [prompt], GREEDY)
    changed = [*prompt[:20], 200, *prompt[21:], 9]
    (completion,) = _run(engine, [changed], GREEDY)
    assert completion.n_reused <= 20
    (expected,) = _run(Engine(make_model(), None, LIMITS), [changed], GREEDY)
    assert completion.token_ids == expected.token_ids


def test_memory_stays_within_both_bounds(make_model: Callable[[], Any]) -> None:
    per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, bytes
    limits = EngineLimits(400, kv_cache_bytes=6 * 192 * per_token, prefix_cache_bytes=300 * per_token)
    engine = Engine(make_model(), None, limits)
    prompts = _prompts(30, seed=10)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, replace(GREEDY, max_tokens=40), lambda completion: None)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.cache_nbytes)
    assert 0 < most <= limits.kv_cache_bytes + limits.prefix_cache_bytes
    bounded = [c.token_ids for c in _run(engine, prompts, GREEDY)]
    assert bounded == [c.token_ids for c in _run(Engine(make_model(), None, LIMITS), prompts, GREEDY)]


def test_rows_grow_with_what_is_there_not_with_what_may_come(engine: Engine) -> None:
    _run(engine, [[1] * 30], SamplingParams(max_tokens=360, stop_token_ids=frozenset(range(304))))
    assert engine.cache_nbytes <= 16 * 64 * 512 + 40 * 512  # 16 rows of 64 tokens, and the finished sequence


def test_a_request_too_large_for_the_cache_is_refused(make_model: Callable[[], Any]) -> None:
    engine = Engine(make_model(), None, EngineLimits(400, kv_cache_bytes=2 * 64 * 512))
    with pytest.raises(ConfigError, match="kv_cache_mb"):
        engine.add("x", [1] * 300, GREEDY, lambda completion: None)
    assert len(_run(engine, [[1] * 100], GREEDY)[0].token_ids) == 12


def test_release_gives_all_memory_back_and_running_requests_go_on(engine: Engine) -> None:
    (prompt,) = _prompts(1, seed=11)
    (expected,) = _run(engine, [prompt], GREEDY)
    done: list[Completion] = []
    engine.add("x", prompt, GREEDY, done.append)
    for _ in range(4):
        engine.step()
    engine.release_kv_cache()
    assert engine.cache_nbytes == 0
    while engine.has_work:
        engine.step()
    assert done[0].token_ids == expected.token_ids


# ---- abort and weights -------------------------------------------------------------------------------------------


def test_abort_returns_what_there_is_and_the_rest_can_be_had_later(engine: Engine) -> None:
    prompts = _prompts(5, seed=12)
    expected = [completion.token_ids for completion in _run(engine, prompts, GREEDY)]
    parts: dict[int, Completion] = {}
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, GREEDY, lambda completion, i=i: parts.__setitem__(i, completion))
    for _ in range(5):
        engine.step()
    assert engine.abort("2")
    assert not engine.abort("2")
    assert sorted(engine.abort_all()) == ["0", "1", "3", "4"]
    assert not engine.has_work
    assert {part.finish_reason for part in parts.values()} == {"abort"}
    for i, prompt in enumerate(prompts):
        begun = parts[i].token_ids
        assert begun == expected[i][: len(begun)]
        rest = replace(GREEDY, max_tokens=12 - len(begun))
        (resumed,) = _run(engine, [prompt + begun], rest, tag="resumed")
        assert begun + resumed.token_ids == expected[i]
        assert resumed.n_reused >= len(prompt) // 16 * 16


def test_a_request_not_yet_started_can_be_aborted(engine: Engine) -> None:
    done: list[Completion] = []
    engine.add("x", [1, 2, 3], GREEDY, done.append)
    engine.abort_all()
    assert (done[0].token_ids, done[0].finish_reason, engine.has_work) == ([], "abort", False)


def _train(model: Any) -> list[tuple[str, torch.Tensor]]:
    """One real optimiser step; the trained weights by name, as a trainer sends them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 250, (4, 32), generator=torch.Generator().manual_seed(0))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return list(model.state_dict().items())


def test_after_an_update_log_probs_are_those_of_the_trained_model(
    engine: Engine, model: Any, plain_log_probs: Callable[..., list[float]]
) -> None:
    prompts = _prompts(6, seed=13)
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    old = _run(engine, prompts, params)
    weights = _train(model)
    engine.load_weights(weights[:5])
    engine.load_weights(iter(weights[5:]))
    engine.finish_weights(version=7)
    new = _run(engine, prompts, params)
    worst_old = 0.0
    for prompt, before, after in zip(prompts, old, new, strict=True):
        assert after.log_probs == pytest.approx(plain_log_probs(model, prompt, after.token_ids), abs=1e-4)
        assert (after.first_version, after.last_version) == (7, 7)
        stale = plain_log_probs(model, prompt, before.token_ids)
        worst_old = max(worst_old, *(abs(a - b) for a, b in zip(before.log_probs, stale, strict=True)))
    assert worst_old > 0.05, "the step changed nothing, so the comparison above shows nothing"


def test_an_update_in_the_middle_of_a_sequence_is_exact_and_said(
    engine: Engine, model: Any, plain_log_probs: Callable[..., list[float]]
) -> None:
    engine.version = 1
    (prompt,) = _prompts(1, seed=14)
    done: list[Completion] = []
    engine.add("x", prompt, GREEDY, done.append)
    for _ in range(5):
        engine.step()
    engine.load_weights(_train(model))
    engine.finish_weights(version=2)
    while engine.has_work:
        engine.step()
    (completion,) = done
    assert (completion.first_version, completion.last_version) == (1, 2)
    trained = plain_log_probs(model, prompt, completion.token_ids)
    assert completion.log_probs[5:] == pytest.approx(trained[5:], abs=1e-4)


def test_an_incomplete_update_is_refused(engine: Engine, model: Any) -> None:
    weights = [(name, tensor) for name, tensor in model.state_dict().items() if "layers.1.mlp" not in name]
    engine.load_weights(weights)
    with pytest.raises(RolloutError, match=r"3 weights did not come.*layers\.1\.mlp"):
        engine.finish_weights(None)


@pytest.mark.parametrize(
    ("name", "shape"), [("model.layers.9.mlp.up_proj.weight", (96, 64)), ("model.norm.weight", (63,))]
)
def test_a_weight_that_does_not_fit_is_refused_by_name(engine: Engine, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(RolloutError, match=name):
        engine.load_weights([(name, torch.zeros(shape))])
