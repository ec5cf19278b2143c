"""A loss mask as runs of ids: its short form in records, and on the way to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TRAINED_FIELD = "rltr_trained"
"""Key of verl's ``extra_fields`` that holds :func:`trained_spans` as JSON text on its way to the dump."""


@dataclass(frozen=True)
class Span:
    """A run of ids under the same mask value, ``start <= position < end``."""

    start: int
    end: int
    trained: bool


def spans_of(mask: Sequence[int]) -> list[Span]:
    """The runs of a mask in order."""
    edges = [at for at in range(1, len(mask)) if mask[at] != mask[at - 1]]
    starts = [0, *edges] if len(mask) else []
    return [Span(start, end, bool(mask[start])) for start, end in zip(starts, [*edges, len(mask)], strict=False)]


def trained_spans(mask: Sequence[int]) -> list[list[int]]:
    """Start and end of every trained run."""
    return [[span.start, span.end] for span in spans_of(mask) if span.trained]


def mask_of(spans: Sequence[Sequence[int]], length: int) -> list[int]:
    """The mask of :func:`trained_spans`; runs behind ``length`` make it longer by one, so that the breach is seen."""
    mask = [0] * length
    for start, end in spans:
        start, end = min(start, length), min(end, length + 1)
        mask[start:end] = [1] * (end - start)
    return mask
