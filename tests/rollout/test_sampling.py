from __future__ import annotations

import math
import random

import pytest
import torch

from rltr_verl.errors import ConfigError
from rltr_verl.rollout.sampling import SamplingParams, sample

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.3, 0.0, -1.0])
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}  # chi-square, p = 0.001, by degrees of freedom


def _draw(params: SamplingParams, n: int, n_vocab: int = 6) -> list[int]:
    draw = random.Random(7)
    tokens, _ = sample(LOGITS.expand(n, -1), [params] * n, [draw.random() for _ in range(n)], n_vocab)
    return tokens


def _expected(temperature: float, top_k: int, top_p: float) -> list[float]:
    """By the definition, token by token, without any of the code under test."""
    probs = [math.exp(x / temperature) for x in LOGITS.tolist()]
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = order[:top_k] if top_k > 0 else order
    total, reached, nucleus = sum(probs[token] for token in kept), 0.0, []
    for token in kept:
        if reached >= top_p:
            break
        nucleus.append(token)
        reached += probs[token] / total
    total = sum(probs[token] for token in nucleus)
    return [probs[token] / total if token in nucleus else 0.0 for token in range(len(probs))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, -1, 1.0), (0.7, -1, 1.0), (1.0, 3, 1.0), (1.0, -1, 0.8), (1.3, 4, 0.7), (1.0, -1, 0.9)],
)
def test_draws_follow_the_filtered_distribution(temperature: float, top_k: int, top_p: float) -> None:
    n = 20_000
    tokens = _draw(SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p), n)
    expected = _expected(temperature, top_k, top_p)
    counts = [tokens.count(token) for token in range(6)]
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    possible = [(count, n * p) for count, p in zip(counts, expected, strict=True) if p > 0]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in possible)
    assert chi_square < CRITICAL[len(possible) - 1]


def test_greedy_takes_the_likeliest_and_reports_temperature_one() -> None:
    tokens, log_probs = sample(LOGITS[None], [SamplingParams(1, temperature=0.0, top_p=0.5)], [0.9], 6)
    assert tokens == [0]
    assert log_probs[0] == pytest.approx(torch.log_softmax(LOGITS, -1)[0].item(), abs=1e-6)


def test_log_probs_are_of_the_whole_vocabulary_whatever_the_filter() -> None:
    params = [SamplingParams(1, temperature=0.5, top_k=1), SamplingParams(1, temperature=0.5), SamplingParams(1)]
    tokens, log_probs = sample(LOGITS.expand(3, -1), params, [0.5] * 3, 6)
    for token, log_prob, temperature in zip(tokens, log_probs, [0.5, 0.5, 1.0], strict=True):
        assert log_prob == pytest.approx(torch.log_softmax(LOGITS / temperature, -1)[token].item(), abs=1e-6)


def test_rows_of_one_batch_do_not_influence_each_other() -> None:
    params = [SamplingParams(1, temperature=0.0), SamplingParams(1, top_k=2), SamplingParams(1, top_p=0.6)]
    together, _ = sample(LOGITS.expand(3, -1), params, [0.3, 0.7, 0.9], 6)
    alone = [sample(LOGITS[None], [p], [u], 6)[0][0] for p, u in zip(params, [0.3, 0.7, 0.9], strict=True)]
    assert together == alone


def test_padding_of_the_embedding_is_never_drawn() -> None:
    tokens = _draw(SamplingParams(1, temperature=5.0), 2000, n_vocab=4)
    assert set(tokens) == {0, 1, 2, 3}
    assert sample(-LOGITS[None], [SamplingParams(1, temperature=0.0)], [0.5], 4)[0] == [3]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-48])
def test_the_ends_of_the_unit_interval_give_possible_tokens(uniform: float) -> None:
    logits = torch.tensor([[-1e30, 0.0, 1.0, -1e30]])
    for params in (SamplingParams(1), SamplingParams(1, top_p=0.99)):
        assert sample(logits, [params], [uniform], 4)[0][0] in (1, 2)


def test_request_is_read_as_verl_sends_it() -> None:
    sent = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "stop": "</a>"}
    params = SamplingParams.from_request({**sent, "max_new_tokens": 9, "skip_special_tokens": False}, 3)
    assert (params.max_tokens, params.temperature, params.stop) == (9, 0.5, ("</a>",))
    assert SamplingParams.from_request({}, 3).max_tokens == 3


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"temprature": 1.0}, "temprature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(sent: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplingParams.from_request(sent, 3)
