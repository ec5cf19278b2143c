"""Keys and values of running sequences, and of finished ones worth keeping.

``SlotCache`` gives every running sequence one row per layer; the model runs on a *packed* step: all new tokens of all
sequences side by side as one sequence of length T, so that no layer computes padding. Only attention must know which
token belongs to which row; it learns it from the ``StepPlan``. ``PrefixStore`` keeps the keys and values of finished
sequences, so that the next turn of a trajectory computes its new tokens only.

The model is any Hugging Face causal LM whose attention goes through ``transformers``' attention interface.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from rltr_verl.errors import ModelError, RolloutError

ATTENTION_NAME = "rltr_slot"
BLOCK = 16  # tokens a hash of the prefix index covers


class Chunk(NamedTuple):
    """Several new tokens of one row: tokens [offset, offset + n_tokens) of the step, at positions from ``start``."""

    row: int
    start: int
    n_tokens: int
    offset: int


@dataclass
class StepPlan:
    """Which packed token belongs where: first one token for each of ``decode_rows``, then the chunks.

    rows, positions: [T] long tensors.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    decode_rows: list[int]
    chunks: list[Chunk]
    dtype: torch.dtype
    decode_length: int
    _masks: dict[tuple[Chunk | None, int | None], torch.Tensor] = field(default_factory=dict)

    @property
    def n_decode(self) -> int:
        return len(self.decode_rows)

    @property
    def contiguous(self) -> bool:
        return self.decode_rows == list(range(self.n_decode))

    def decode_mask(self, window: int | None) -> torch.Tensor:
        """[n_decode, 1, 1, decode_length], 0 where a row's token may look, -inf elsewhere; the same for all layers."""
        if (None, window) not in self._masks:
            last = self.positions[: self.n_decode].unsqueeze(1)
            self._masks[None, window] = _mask(last, self.decode_length, window, self.dtype)[:, None, None]
        return self._masks[None, window]

    def chunk_mask(self, chunk: Chunk, window: int | None) -> torch.Tensor:
        """[n_tokens, start + n_tokens], likewise."""
        if (chunk, window) not in self._masks:
            end = chunk.start + chunk.n_tokens
            positions = self.positions[chunk.offset : chunk.offset + chunk.n_tokens].unsqueeze(1)
            self._masks[chunk, window] = _mask(positions, end, window, self.dtype)
        return self._masks[chunk, window]


def _mask(positions: torch.Tensor, length: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive causal mask [len(positions), length] for queries at ``positions`` ([n, 1]) over keys 0..length-1."""
    keys = torch.arange(length, device=positions.device)
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))


class LayerView(NamedTuple):
    """What the model's attention receives in place of keys and values: one layer's rows and the step's plan."""

    keys: torch.Tensor
    values: torch.Tensor
    plan: StepPlan


class SlotCache(Cache):
    """One row a running sequence: per layer keys and values of shape [rows, kv heads, length, head size]."""

    def __init__(self, n_layers: int) -> None:
        super().__init__(layers=[])
        self.keys: list[torch.Tensor | None] = [None] * n_layers
        self.values: list[torch.Tensor | None] = [None] * n_layers
        self.n_rows = 0
        self.length = 0
        self.plan: StepPlan | None = None
        self._token_bytes = [0] * n_layers

    def update(  # type: ignore[override]  # what attention receives is a view, not tensors
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[LayerView, LayerView]:
        """Write new keys and values ([1, kv heads, T, head size]) to their rows; hand out the layer's view."""
        plan = self.plan
        if plan is None:
            raise RolloutError("the cache was used outside a step", where="SlotCache.update", fix="call Engine.step")
        if self.keys[layer_idx] is None:
            self.keys[layer_idx] = self._allocate(key_states)
            self.values[layer_idx] = self._allocate(value_states)
            self._token_bytes[layer_idx] = _token_bytes(key_states) + _token_bytes(value_states)
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        assert keys is not None and values is not None
        keys[plan.rows, :, plan.positions] = key_states[0].transpose(0, 1)
        values[plan.rows, :, plan.positions] = value_states[0].transpose(0, 1)
        view = LayerView(keys, values, plan)
        return view, view

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        # Zeros, not garbage: a masked key's weight is 0, and 0 times a stray NaN would still be NaN.
        return states.new_zeros(self.n_rows, states.shape[1], self.length, states.shape[3])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always passed to the model, it must not count for itself."""
        return 0

    def reserve(self, n_rows: int, length: int, max_bytes: int) -> None:
        """Make room for ``n_rows`` rows of ``length`` tokens, keeping what is stored.

        Room once made is kept, unless more rows *and* longer rows than ever before would then exceed ``max_bytes``.
        """
        if n_rows <= self.n_rows and length <= self.length:
            return
        rows, tokens = max(n_rows, self.n_rows), max(length, self.length)
        if rows * tokens * self.bytes_per_token > max_bytes:
            rows, tokens = n_rows, length
        kept_rows, kept_tokens = min(rows, self.n_rows), min(tokens, self.length)
        self.n_rows, self.length = rows, tokens
        for side in (self.keys, self.values):
            for layer, old in enumerate(side):
                if old is not None:
                    grown = old.new_zeros(rows, old.shape[1], tokens, old.shape[3])
                    grown[:kept_rows, :, :kept_tokens] = old[:kept_rows, :, :kept_tokens]
                    side[layer] = grown

    def release(self) -> None:
        """Give all memory back."""
        self.keys = [None] * len(self.keys)
        self.values = [None] * len(self.values)
        self.n_rows = self.length = 0

    @property
    def bytes_per_token(self) -> int:
        """Of all layers together; known once the model has run."""
        return sum(self._token_bytes)

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in (*self.keys, *self.values) if stored is not None)

    def copy_row(self, source: int, target: int, n_tokens: int) -> None:
        """Copy the first ``n_tokens`` of a row to another row."""
        for stored in (*self.keys, *self.values):
            if stored is not None:
                stored[target, :, :n_tokens] = stored[source, :, :n_tokens]

    def export_row(self, row: int, n_tokens: int) -> list[torch.Tensor]:
        """Copies of the first ``n_tokens`` of a row: keys of all layers, then values, each [kv heads, n, head size]."""
        return [stored[row, :, :n_tokens].clone() for stored in (*self.keys, *self.values)]  # type: ignore[index]

    def import_row(self, row: int, n_tokens: int, tensors: Sequence[torch.Tensor]) -> None:
        """Undo ``export_row``, for the first ``n_tokens``."""
        for stored, tensor in zip((*self.keys, *self.values), tensors, strict=True):
            assert stored is not None
            stored[row, :, :n_tokens] = tensor[:, :n_tokens]


def _token_bytes(states: torch.Tensor) -> int:
    return states.shape[1] * states.shape[3] * states.element_size()


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: LayerView,
    value: LayerView,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed step against the rows of a ``SlotCache``.

    Args:
        query: [1, heads, T, head size].
        key, value: both the layer's ``LayerView``.

    Returns:
        [1, T, heads, head size], and None for the weights.
    """
    if not isinstance(key, LayerView):
        raise ModelError(
            f"{type(module).__name__} attends without the cache it was given", fix="use rollout.name=vllm for it"
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} needs attention with {name!r}, which the transformers rollout has not",
                fix="use rollout.name=vllm for this model",
            )
    return packed_attention(query[0], key, scaling, sliding_window).unsqueeze(0), None


def packed_attention(query: torch.Tensor, layer: LayerView, scaling: float | None, window: int | None) -> torch.Tensor:
    """[heads, T, head size] -> [T, heads, head size]: each token over the keys of its row up to itself."""
    plan, parts = layer.plan, []
    if plan.n_decode:
        parts.append(_decode_attention(query[:, : plan.n_decode], layer, scaling, window))
    parts += [_chunk_attention(query, layer, chunk, scaling, window) for chunk in plan.chunks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode_attention(query: torch.Tensor, layer: LayerView, scaling: float | None, window: int | None) -> torch.Tensor:
    """One query a row: [heads, n, size] -> [n, heads, size].

    The heads that share a key head are passed as if they were successive queries, so that no key is ever repeated.
    """
    plan = layer.plan
    keys, values = layer.keys, layer.values
    if plan.contiguous:
        keys, values = keys[: plan.n_decode], values[: plan.n_decode]
    else:
        keys, values = keys[plan.rows[: plan.n_decode]], values[plan.rows[: plan.n_decode]]
    grouped = query.transpose(0, 1).reshape(plan.n_decode, keys.shape[1], -1, query.shape[-1])
    out = F.scaled_dot_product_attention(
        grouped,
        keys[:, :, : plan.decode_length],
        values[:, :, : plan.decode_length],
        attn_mask=plan.decode_mask(window),
        scale=scaling,
    )
    return out.reshape(plan.n_decode, query.shape[0], -1)


def _chunk_attention(
    query: torch.Tensor, layer: LayerView, chunk: Chunk, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Several queries of one row over all of its keys: [heads, T, size] -> [n_tokens, heads, size]."""
    end = chunk.start + chunk.n_tokens
    whole = chunk.start == 0 and (window is None or window >= end)
    out = F.scaled_dot_product_attention(
        query[None, :, chunk.offset : chunk.offset + chunk.n_tokens],
        layer.keys[chunk.row : chunk.row + 1, :, :end],
        layer.values[chunk.row : chunk.row + 1, :, :end],
        attn_mask=None if whole else layer.plan.chunk_mask(chunk, window),
        is_causal=whole,
        scale=scaling,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


AttentionInterface.register(ATTENTION_NAME, slot_attention)


class PrefixOwner(Protocol):
    """Something whose first ``n_cached`` tokens have keys and values that others may copy."""

    tokens: list[int]
    hashes: list[int]

    @property
    def n_cached(self) -> int: ...


def block_hashes(tokens: Sequence[int]) -> list[int]:
    """One hash per whole block of ``BLOCK`` tokens; each covers everything from the first token on."""
    hashes, before = [], 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        before = hash((before, *tokens[end - BLOCK : end]))
        hashes.append(before)
    return hashes


class PrefixIndex:
    """Finds who holds the longest cached prefix of a prompt. Hashes only propose; tokens are compared."""

    def __init__(self) -> None:
        self._owners: dict[int, PrefixOwner] = {}

    def add(self, owner: PrefixOwner) -> None:
        """Offer the whole blocks among the owner's cached tokens."""
        for block in owner.hashes[: owner.n_cached // BLOCK]:
            self._owners[block] = owner

    def remove(self, owner: PrefixOwner) -> None:
        """Withdraw every block that is still in this owner's name."""
        for block in owner.hashes:
            if self._owners.get(block) is owner:
                del self._owners[block]

    def clear(self) -> None:
        self._owners.clear()

    def find(self, tokens: Sequence[int], hashes: Sequence[int], limit: int) -> tuple[PrefixOwner | None, int]:
        """The owner of the longest cached prefix and its length in tokens, at most ``limit``."""
        for n_blocks in range(len(hashes), 0, -1):
            owner = self._owners.get(hashes[n_blocks - 1])
            if owner is not None:
                n_tokens = _common_prefix(tokens, owner.tokens, n_blocks * BLOCK, min(owner.n_cached, limit))
                if n_tokens:
                    return owner, n_tokens
        return None, 0


def _common_prefix(one: Sequence[int], other: Sequence[int], known: int, limit: int) -> int:
    known = min(known, limit)
    if one[:known] != other[:known]:  # two different texts with one hash
        return 0
    limit = min(limit, len(one), len(other))
    while known < limit and one[known] == other[known]:
        known += 1
    return known


@dataclass(eq=False)
class StoredPrefix:
    """A finished sequence: its tokens and the keys and values of all of them."""

    tokens: list[int]
    hashes: list[int]
    tensors: list[torch.Tensor]

    @property
    def n_cached(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class PrefixStore:
    """Finished sequences, least recently used out first, never more than ``max_bytes`` of keys and values."""

    def __init__(self, index: PrefixIndex, max_bytes: int) -> None:
        self._index = index
        self._entries: OrderedDict[int, StoredPrefix] = OrderedDict()
        self.max_bytes = max_bytes
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, entry: StoredPrefix) -> None:
        """Keep an entry, dropping old ones to make room; one that could never fit is not kept."""
        if entry.nbytes > self.max_bytes:
            return
        while self.nbytes + entry.nbytes > self.max_bytes:
            self.drop(next(iter(self._entries.values())))
        self._entries[id(entry)] = entry
        self.nbytes += entry.nbytes
        self._index.add(entry)

    def touch(self, entry: StoredPrefix) -> None:
        """Mark as just used."""
        if id(entry) in self._entries:
            self._entries.move_to_end(id(entry))

    def drop(self, entry: StoredPrefix) -> None:
        """Forget an entry, if it is still kept."""
        if self._entries.pop(id(entry), None) is not None:
            self.nbytes -= entry.nbytes
            self._index.remove(entry)

    def clear(self) -> None:
        for entry in list(self._entries.values()):
            self.drop(entry)
