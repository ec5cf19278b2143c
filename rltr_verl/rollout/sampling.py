"""From logits to tokens: sampling settings of a request, and the batched draw.

The log-probability reported for a token is the one a trainer computes for it: log-softmax over the full vocabulary of
logits / temperature, *before* top-k and top-p. The draw itself happens after those filters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rltr_verl.errors import ConfigError

# Keys that other engines accept and whose neutral value changes nothing here. Any other value is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "min_p": (0, None),
    "min_tokens": (0, None),
    "n": (1, None),
    "prompt_logprobs": (None,),
}
# Keys about text output; this engine answers in token ids, so they have nothing to act on.
_TEXT_ONLY = {"skip_special_tokens", "spaces_between_special_tokens", "detokenize"}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks of the engine.

    temperature 0 means greedy; top_k <= 0 and top_p 1 mean no filter; seed None lets the engine choose one.
    ``stop`` strings are looked for in the generated text only, never across the border to the prompt.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(self.temperature >= 0, "temperature", self.temperature, "0 (greedy) or above")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(all(self.stop), "stop", self.stop, "non-empty strings")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @classmethod
    def from_request(cls, request: Mapping[str, Any], default_max_tokens: int) -> SamplingParams:
        """Read a ``sampling_params`` dictionary as verl's agent loops send it (vLLM's names).

        Raises ConfigError for a key this engine does not know or a setting it cannot honour.
        """
        given = {key: value for key, value in request.items() if key not in _TEXT_ONLY}
        for key, neutral in _NEUTRAL.items():
            value = given.pop(key, neutral[0])
            _require(value in neutral, key, value, f"{neutral[0]} (this engine has no such setting)")
        max_tokens = given.pop("max_tokens", given.pop("max_new_tokens", None))
        stop = given.pop("stop", None) or ()
        stop_ids = given.pop("stop_token_ids", None) or ()
        unknown = set(given) - set(cls.__slots__)
        if unknown:
            raise ConfigError(
                f"unknown sampling parameter {sorted(unknown)}",
                where="sampling_params",
                fix=f"use only {sorted(set(cls.__slots__) | set(_NEUTRAL) | _TEXT_ONLY)}",
            )
        return cls(
            max_tokens=default_max_tokens if max_tokens is None else int(max_tokens),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=frozenset(int(token) for token in stop_ids),
            **{key: value for key, value in given.items() if value is not None},
        )


def _require(holds: bool, key: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{key} is {value!r}", where="sampling_params", fix=f"set {key} to {expected}")


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float], n_vocab: int
) -> tuple[list[int], list[float]]:
    """Draw one token a row.

    Args:
        logits: [rows, vocabulary], any float type.
        params: one per row.
        uniforms: one number in [0, 1) a row; the token is the inverse of the cumulative distribution at it.
        n_vocab: ids from here on are padding of the embedding and are never drawn.

    Returns:
        Token ids, and for each its log-probability (natural logarithm) under softmax(logits / temperature).
    """
    logits = logits.float()
    temperatures = [1.0 if p.greedy else p.temperature for p in params]
    if any(t != 1.0 for t in temperatures):
        logits = logits / _column(temperatures, logits)
    log_probs = torch.log_softmax(logits, dim=-1)
    allowed = log_probs[:, :n_vocab]
    if all(p.greedy for p in params):
        tokens = allowed.argmax(dim=-1, keepdim=True)
    else:
        tokens = _draw(allowed.exp(), params, uniforms)
        if any(p.greedy for p in params):
            greedy = torch.tensor([[p.greedy] for p in params], device=logits.device)
            tokens = torch.where(greedy, allowed.argmax(dim=-1, keepdim=True), tokens)
    # One transfer for both: a double holds every token id and every float exactly.
    chosen = torch.cat([tokens.double(), log_probs.gather(1, tokens).double()], dim=1).tolist()
    return [int(token) for token, _ in chosen], [log_prob for _, log_prob in chosen]


def _column(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device).unsqueeze(1)


def _draw(probs: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> torch.Tensor:
    """Inverse-transform sampling: the first token whose cumulative probability exceeds u times the total."""
    order = None
    if any(p.filtered for p in params):
        probs, order = _filter(probs, params)
    # Double precision: in float the sum over a large vocabulary would shift the tail by whole tokens.
    cumulative = probs.double().cumsum(dim=-1)
    target = _column(uniforms, cumulative) * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, target, right=True).clamp_(max=probs.shape[1] - 1)
    return picked if order is None else order.gather(1, picked)


def _filter(probs: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in falling order with what top-k and then top-p exclude set to 0, and that order's token ids.

    top-p keeps the smallest set of tokens whose probability, renormalised after top-k, reaches p.
    """
    vocabulary = probs.shape[1]
    ks = [p.top_k if p.filtered and 0 < p.top_k < vocabulary else vocabulary for p in params]
    kept, order = probs.topk(max(ks), dim=-1)
    rank = torch.arange(kept.shape[1], device=probs.device)
    kept = kept.masked_fill(rank >= _column(ks, kept, torch.long), 0.0)
    before = kept.double().cumsum(dim=-1) - kept
    limit = _column([p.top_p if p.filtered else 2.0 for p in params], before) * kept.sum(dim=-1, keepdim=True)
    return kept.masked_fill(before >= limit, 0.0), order
