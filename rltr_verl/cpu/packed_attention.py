"""Attention over sequences packed side by side, without flash-attention.

A batch of ragged trajectories padded to the longest is a third padding, and every layer and the logits pay for it.
verl can pack sequences instead (``use_remove_padding``), but then attention must keep them apart, which only
flash-attention does. Here the layers run on the packed tokens, and only queries, keys and values are padded, for one
causal call of ``scaled_dot_product_attention``. Padding stands behind a sequence, so no real token ever attends to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PretrainedConfig

from rltr_verl.errors import ModelError

NAME = "rltr_packed"
"""Value of a model configuration's ``_attn_implementation``."""

_KINDS = {"llama", "qwen2", "qwen3"}  # whose attention layers are plainly causal and are given the positions


class Packing(NamedTuple):
    """Where packed tokens stand in a padded batch.

    Attributes:
        shape: rows and columns of the batch.
        gather: (rows * columns), the packed token at each place; any token where there is padding.
        scatter: (tokens), the place of each packed token.
    """

    shape: tuple[int, int]
    gather: torch.Tensor
    scatter: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor) -> Packing:
        """Read it from positions (tokens) that start at 0 with every sequence."""
        starts = (positions == 0).nonzero().squeeze(-1)
        row = (positions == 0).cumsum(0) - 1
        columns = int(positions.max()) + 1
        places = starts.unsqueeze(1) + torch.arange(columns, device=positions.device)
        gather = places.clamp_(max=len(positions) - 1).view(-1)
        return cls((len(starts), columns), gather, row * columns + positions)


def fits(config: PretrainedConfig) -> bool:
    """Return whether a model of this configuration can run on packed sequences: known kind, full causal attention."""
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    return config.model_type in _KINDS and layers == {"full_attention"} and not getattr(config, "use_sliding_window", 0)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed sequence, as ``transformers`` calls it.

    Args:
        module: the attention layer.
        query: (1, heads, tokens, size).
        key, value: (1, key-value heads, tokens, size).
        attention_mask: unused; a model with this implementation is given none.
        dropout: probability of dropping an attention weight.
        scaling: factor of the scores, one over the root of ``size`` if None.
        position_ids: (1, tokens), from 0 within each sequence.

    Returns:
        The output (1, tokens, heads, size), and no weights.

    Raises:
        ModelError: the layer passes no positions on, or they are not those of one packed row.
    """
    if position_ids is None or position_ids.shape != (1, query.shape[2]):
        where = type(module).__name__
        raise ModelError("packed attention needs the positions of one packed row", where=where, fix="use sdpa.")
    packing = Packing.of(position_ids[0])
    q, k, v = (_pad(tensor, packing) for tensor in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True)
    rows = out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])
    return rows.index_select(0, packing.scatter).unsqueeze(0), None


def _pad(packed: torch.Tensor, packing: Packing) -> torch.Tensor:
    """(1, heads, tokens, size) to (rows, heads, columns, size)."""
    _, heads, _, size = packed.shape
    chosen = packed[0].transpose(0, 1).index_select(0, packing.gather)
    return chosen.view(*packing.shape, heads, size).transpose(1, 2)


AttentionInterface.register(NAME, packed_attention)
