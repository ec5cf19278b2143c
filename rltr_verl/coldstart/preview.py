"""A row of the cold start as it is trained: trained tokens stand out, the context is dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from rltr_verl.masks import spans_of

TRAINED, CONTEXT = "bold green", "dim"


def coloured(ids: Sequence[int], mask: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Text:
    """The text of ``ids``, special tokens included.

    Args:
        ids: of the whole row.
        mask: 1 where an id is trained.
        decode: ids to text, special tokens kept.
    """
    text = Text()
    for span in spans_of(mask):
        text.append(printable(decode(ids[span.start : span.end])), TRAINED if span.trained else CONTEXT)
    return text


def printable(text: str) -> str:
    """``text`` with everything escaped that could steer a terminal."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
