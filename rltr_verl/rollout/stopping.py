"""Stop strings at the price of a set look-up per token.

A token can complete a stop string only if its own text overlaps the string's end. Those tokens are found once per
stop string; only when one of them is sampled is the tail of the output decoded and searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rltr_verl.errors import ConfigError

_BROKEN = "�"  # what decoding yields for a token that holds only part of a character


class StopMatcher:
    """Finds stop strings in sampled token ids. ``tokenizer`` is a Hugging Face tokenizer, or None: no stop strings."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._candidates: dict[tuple[str, ...], frozenset[int]] = {}

    def candidates(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Every token id after which one of the strings may have just been completed (a superset of the exact set)."""
        if not stop:
            return frozenset()
        if stop not in self._candidates:
            texts = self._token_texts
            self._candidates[stop] = frozenset(
                token for token, text in enumerate(texts) if any(_may_complete(text, string) for string in stop)
            )
        return self._candidates[stop]

    def completed(self, output: Sequence[int], stop: tuple[str, ...]) -> str | None:
        """The stop string that the text of ``output`` holds in its tail, or None.

        The tail is long enough for any string: a token that decodes to text adds at least one byte of it.
        """
        window = output[-(4 * max(len(string) for string in stop) + 8) :]
        text = self.decode(window)
        return next((string for string in stop if string in text), None)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, special tokens included."""
        if self._tokenizer is None:
            raise ConfigError(
                "stop strings need a tokenizer and the engine has none",
                where="sampling_params.stop",
                fix="use stop_token_ids, or a model folder with a tokenizer",
            )
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def _token_texts(self) -> list[str]:
        self.decode([])  # says what is wrong when there is no tokenizer
        return [self.decode([token]) for token in range(len(self._tokenizer))]  # type: ignore[arg-type]


def _may_complete(text: str, string: str) -> bool:
    # A token without text of its own (a bare space in some tokenizers) or with half a character cannot be judged alone.
    if text == "" or _BROKEN in text or string in text:
        return True
    return any(text.startswith(string[-k:]) for k in range(1, len(string)))
