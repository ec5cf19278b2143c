"""The chat template as token pieces: the prompt, and the glue around observations.

Sampled ids are never re-encoded. What the template puts between an assistant turn and the next one is found once, by
rendering a conversation with marker texts; afterwards each observation costs one ``encode``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from rltr_verl.errors import ModelError

_MARKS = ("RLTRUSERX", "RLTRASSISTANTX", "RLTRFIRSTX", "RLTRSECONDX")
_TAGS = re.compile(r"<(?=/?(?:think|tool_call|tool_response|tools|answer)\b)")
_CONTROL = re.compile(r"<(?=[|｜])")

_SHORTEST_CUT = 16


@dataclass(frozen=True)
class Glue:
    """Texts around observations: ``before`` the first, ``between`` two, ``after`` the last (opens the next turn)."""

    turn_end: str
    before: str
    between: str
    after: str


class ChatTemplate:
    """A tokenizer's chat template, used piecewise.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template that renders the role ``tool``.
        schemas: OpenAI tool schemas shown to the model.
        template_kwargs: further arguments of ``apply_chat_template`` (``enable_thinking``, ...).

    Raises:
        ModelError: the tokenizer has no chat template, or the template drops tool messages.
    """

    def __init__(
        self, tokenizer: Any, schemas: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            fix = "use an instruct model, or set actor_rollout_ref.model.custom_chat_template."
            raise ModelError("the tokenizer has no chat template", where=str(tokenizer.name_or_path), fix=fix)
        self._tokenizer = tokenizer
        self._schemas = [dict(schema) for schema in schemas]
        self._kwargs = dict(template_kwargs or {})
        self._special = _special_pattern(tokenizer)
        self.glue = self._find_glue()
        self._prompt_ids = lru_cache(maxsize=4096)(self._encode_prompt)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an assistant turn."""
        ids = {self._tokenizer.eos_token_id, *self.encode(self.glue.turn_end)[:1]}
        return frozenset(item for item in ids if item is not None)

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Ids of the whole prompt, generation prompt included. Equal prompts are rendered once per process."""
        shown = self._schemas if schemas is None else schemas
        return list(self._prompt_ids(json.dumps([list(messages), list(shown)], ensure_ascii=False)))

    def observation_ids(self, texts: Sequence[str], *, turn_ended: bool, budget: int | None = None) -> list[int]:
        """Ids from the end of an assistant turn to the start of the next.

        Args:
            texts: one observation per call, in order; control tokens and protocol tags in them are made inert.
            turn_ended: the sampled ids already hold the end-of-turn token.
            budget: longest allowed result in tokens; the longest observations are cut in the middle, the glue never.

        Returns an empty list when not even the glue fits the budget.
        """
        whole = [self.inert(text) for text in texts]
        ids = self.encode(self._joined(whole, turn_ended))
        cap = max(map(len, whole), default=0)
        while budget is not None and len(ids) > budget:
            cap = cap * 2 // 3
            if cap < _SHORTEST_CUT:
                return []
            ids = self.encode(self._joined([cut_middle(text, cap) for text in whole], turn_ended))
        return ids

    def cut_tokens(self, text: str, limit: int) -> str:
        """``text`` with its middle taken out so that it has about ``limit`` tokens at most."""
        if len(text) <= limit:
            return text
        ids = self.encode(text)
        if len(ids) <= limit:
            return text
        half = max(1, limit // 2 - 2)
        return f"{self._tokenizer.decode(ids[:half])} ...[cut]... {self._tokenizer.decode(ids[-half:])}"

    def inert(self, text: str) -> str:
        """``text`` without anything that the tokenizer or the parser would take for structure."""
        text = _CONTROL.sub("< ", _TAGS.sub("< ", text))
        return (
            self._special.sub(lambda match: match.group()[0] + " " + match.group()[1:], text) if self._special else text
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, special tokens kept: a forged control token must be seen."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _joined(self, pieces: Sequence[str], turn_ended: bool) -> str:
        start = "" if turn_ended else self.glue.turn_end
        return start + self.glue.before + self.glue.between.join(pieces) + self.glue.after

    def _encode_prompt(self, key: str) -> tuple[int, ...]:
        messages, shown = json.loads(key)
        return tuple(self.encode(self._render(messages, shown)))

    def _render(self, messages: list[dict[str, Any]], shown: list[dict[str, Any]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=shown or None, add_generation_prompt=True, tokenize=False, **self._kwargs
        )

    def _find_glue(self) -> Glue:
        user, assistant, first, second = _MARKS
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
            {"role": "tool", "content": first},
            {"role": "tool", "content": second},
        ]
        text = self._render(messages, self._schemas)
        if first not in text or second not in text:
            messages[1] = {**messages[1], "tool_calls": [call, call]}
            text = self._render(messages, self._schemas)
        if not all(mark in text for mark in (assistant, first, second)):
            fix = "use a chat template that renders messages of role 'tool'."
            raise ModelError("the chat template drops tool messages", where=str(self._tokenizer.name_or_path), fix=fix)
        tail = text.split(assistant, 1)[1]
        opening, rest = tail.split(first, 1)
        between, after = rest.split(second, 1)
        turn_end, before = self._split_turn_end(opening)
        return Glue(turn_end, before, between, after)

    def _split_turn_end(self, opening: str) -> tuple[str, str]:
        """Part the text behind an assistant turn into its end-of-turn token and the rest."""
        eos = self._tokenizer.eos_token
        if eos and eos in opening:
            head, tail = opening.split(eos, 1)
            return head + eos, tail
        return "", opening


def cut_middle(text: str, limit: int) -> str:
    """``text`` cut to about ``limit`` characters, head and tail kept."""
    if len(text) <= limit:
        return text
    half = max(1, limit // 2)
    return f"{text[:half]} ...[cut]... {text[-half:]}"


def _special_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches every special token of the tokenizer of two characters or more."""
    added = getattr(tokenizer, "added_tokens_decoder", {}) or {}
    special = {str(token.content) for token in added.values() if token.special} | set(tokenizer.all_special_tokens)
    names = sorted((name for name in special if len(name) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None
