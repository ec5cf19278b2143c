"""The chat template as token pieces: the prompt, and the glue around observations.

Sampled ids are never re-encoded. What the template puts between an assistant turn and the next one is found once, by
rendering a conversation with marker texts; afterwards an observation costs one ``encode``, or two where it is cut.

Observations are data. Before one enters the context, whatever in it the tokenizer or the parser could take for
structure is broken up by a space behind its first character (``< |im_end|>``, ``< tool_call>``); then it is cut.
"""

from __future__ import annotations

import bisect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from jinja2 import TemplateError

from rltr_verl.errors import ModelError

Keep = Literal["middle", "head", "tail"]
"""What is cut away: ``middle``, or all behind the ``head``, or all before the ``tail``."""

CUT_MARK = "...[cut]..."
"""Stands in an observation where text was taken out."""

_MARKS = ("RLTRUSERX", "RLTRASSISTANTX", "RLTRFIRSTX", "RLTRSECONDX")
_NAMES = r"think(?:ing)?|tool_(?:call|response|result)s?|tools|answer|arg_(?:key|value)"
_STRUCTURE = re.compile(rf"[<＜](?=[|｜]|/?(?:{_NAMES})\b|/?(?:function|parameter)[=>])", re.IGNORECASE)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MARKUP = re.compile(r"[<>\[\]|｜]")

_WINDOW = 32
"""Characters a token that is looked at: a huge text is not encoded as a whole only to be cut."""


@dataclass(frozen=True)
class Glue:
    """Texts around observations: ``before`` the first, ``between`` two, ``after`` the last (opens the next turn).

    ``as_json`` tells that the template writes a result as a JSON string, quotes and line breaks escaped.
    """

    turn_end: str
    before: str
    between: str
    after: str
    as_json: bool = False


class ChatTemplate:
    """A tokenizer's chat template, used piecewise.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template that renders the role ``tool``.
        schemas: OpenAI tool schemas shown to the model.
        template_kwargs: further arguments of ``apply_chat_template`` (``enable_thinking``, ...).

    Raises:
        ModelError: the tokenizer has no chat template, or the template drops or refuses tool messages.
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
        """Ids at which a policy's turn ends."""
        return frozenset(item for item in (self._tokenizer.eos_token_id, self._end_id) if item is not None)

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Ids that open or close turns, tags and the like: no observation may hold one."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {}) or {}
        return frozenset(index for index, token in added.items() if _is_structure(token)) | self.eos_ids

    @cached_property
    def _end_id(self) -> int | None:
        """The id that the glue goes on behind."""
        ids = self.encode(self.glue.turn_end)
        return ids[-1] if ids else None

    def ends_turn(self, sampled: Sequence[int]) -> bool:
        """Whether sampled ids close the turn as the template does; otherwise the glue closes it, untrained."""
        return bool(sampled) and sampled[-1] == self._end_id

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Ids of the whole prompt, generation prompt included. Equal prompts are rendered once per process."""
        shown = self._schemas if schemas is None else schemas
        return list(self._prompt_ids(json.dumps([list(messages), list(shown)], ensure_ascii=False)))

    def rendered_ids(
        self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]], *, open_turn: bool
    ) -> list[int]:
        """Ids of a whole conversation, rendered afresh; ``open_turn`` adds the generation prompt.

        Raises ModelError where the template refuses the conversation.
        """
        return self.encode(self._render(list(map(dict, messages)), list(map(dict, schemas)), open_turn))

    @cached_property
    def opened(self) -> str:
        """What the generation prompt writes of a turn that the template does not write by itself, such as
        ``<think>``."""
        user, assistant = _MARKS[:2]
        question = {"role": "user", "content": user}
        whole = self._render([question, {"role": "assistant", "content": assistant}], self._schemas, False)
        prompt = self._render([question], self._schemas)
        return prompt[len(os.path.commonprefix([prompt, whole.split(assistant, 1)[0]])) :]

    @cached_property
    def prompted_thought(self) -> str:
        """What the generation prompt writes of a thought: nothing, ``<think>``, or an empty thought.

        Also where the template writes the same before a stored turn, so that :attr:`opened` is empty.
        """
        question = [{"role": "user", "content": _MARKS[0]}]
        closed, opened = (self._render(question, self._schemas, open_turn) for open_turn in (False, True))
        _, tag, rest = opened.removeprefix(closed).partition("<think>")
        return tag + rest

    def observation_ids(self, texts: Sequence[str], *, turn_ended: bool, budget: int | None = None) -> list[int]:
        """The ids of :meth:`observe` alone, without a limit per observation."""
        return self.observe(texts, turn_ended=turn_ended, budget=budget)[0]

    def observe(
        self,
        texts: Sequence[str],
        *,
        turn_ended: bool,
        budget: int | None = None,
        limit: int | None = None,
        keep: Keep = "middle",
    ) -> tuple[list[int], list[str]]:
        """What stands between an assistant turn and the next one, and what of each observation the model sees there.

        Args:
            texts: one observation per call, in order.
            turn_ended: the sampled ids close the turn themselves (:meth:`ends_turn`).
            budget: longest allowed result in tokens; the longest observations are cut further, the glue never.
            limit: longest observation in tokens.
            keep: what a cut takes away.

        Returns:
            The ids, and the texts as they stand in them: made inert, then cut. Where not even the glue and a token of
            an observation fit the budget, no ids and empty texts.
        """
        seen = [self.inert(text) for text in texts]
        if limit is not None:
            seen = [self.cut_tokens(text, limit, keep) for text in seen]
        ids = self.encode(self._joined(seen, turn_ended))
        if budget is None or len(ids) <= budget:
            return ids, seen
        return self._fitted(seen, turn_ended, budget, keep)

    def _fitted(self, texts: list[str], turn_ended: bool, budget: int, keep: Keep) -> tuple[list[int], list[str]]:
        """Cut the longest texts until all fit; what the tokens of a cut text add up to is known only afterwards."""
        lengths = [len(self.encode(text)) for text in texts]
        room = budget - len(self.encode(self._joined([""] * len(texts), turn_ended)))
        while room > 0:
            cap = _fair_share(lengths, room)
            seen = [self.cut_tokens(text, cap, keep) for text in texts]
            ids = self.encode(self._joined(seen, turn_ended))
            if len(ids) <= budget:
                return ids, seen
            room -= len(ids) - budget
        return [], [""] * len(texts)

    def cut_tokens(self, text: str, limit: int, keep: Keep = "middle") -> str:
        """``text`` cut to at most ``limit`` tokens; :data:`CUT_MARK` stands for what is gone, if it fits as well.

        Characters are never split, so the result is made of pieces of ``text``.
        """
        if len(text.encode()) <= limit or (len(text) <= _WINDOW * limit and len(self.encode(text)) <= limit):
            return text
        mark = {"middle": f" {CUT_MARK} ", "head": f" {CUT_MARK}", "tail": f"{CUT_MARK} "}[keep]
        room = limit - len(self.encode(mark))
        if room < 1:  # two ends side by side could make a tag that the text does not hold
            mark, room, keep = "", limit, "tail" if keep == "tail" else "head"
        while room > 0:
            tail = {"middle": room // 2, "head": 0, "tail": room}[keep]
            cut = self._head(text, room - tail) + mark + self._tail(text, tail)
            over = len(self.encode(cut)) - limit
            if over <= 0:
                return cut
            room -= over
        return ""

    def _head(self, text: str, n: int) -> str:
        """The longest beginning of at most about ``n`` tokens."""
        text = text[: _WINDOW * n]
        if not self._tokenizer.is_fast:
            return text[: self._fitting(len(text), n, lambda chars: text[:chars])]
        offsets = self._offsets(text)
        return text if len(offsets) <= n else text[: offsets[n][0]]

    def _tail(self, text: str, n: int) -> str:
        """The longest end of at most about ``n`` tokens."""
        if n < 1:
            return ""
        text = text[-_WINDOW * n :]
        if not self._tokenizer.is_fast:
            return text[len(text) - self._fitting(len(text), n, lambda chars: text[len(text) - chars :]) :]
        offsets = self._offsets(text)
        return text if len(offsets) <= n else text[offsets[-n - 1][1] :]

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        """Where in ``text`` each of its tokens stands."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["offset_mapping"]

    def _fitting(self, longest: int, n: int, part: Callable[[int], str]) -> int:
        """How many characters make at most ``n`` tokens, for tokenizers that do not tell where a token stands."""
        return bisect.bisect_right(range(longest + 1), n, key=lambda chars: len(self.encode(part(chars)))) - 1

    def inert(self, text: str) -> str:
        """``text`` without anything that the tokenizer or the parser would take for structure; inert text stays."""
        text = _STRUCTURE.sub(_broken, _LONE_SURROGATE.sub("\ufffd", text))
        while self._special and self._special.search(text):
            text = self._special.sub(_broken, text)
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without anything around it and without a warning about the tokenizer's own length limit."""
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, special tokens kept: a forged control token must be seen."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _joined(self, pieces: Sequence[str], turn_ended: bool) -> str:
        start = "" if turn_ended else self.glue.turn_end
        if self.glue.as_json:
            pieces = [json.dumps(piece, ensure_ascii=False)[1:-1] for piece in pieces]
        return start + self.glue.before + self.glue.between.join(pieces) + self.glue.after

    def _encode_prompt(self, key: str) -> tuple[int, ...]:
        messages, shown = json.loads(key)
        return tuple(self.encode(self._render(messages, shown)))

    def _render(self, messages: list[dict[str, Any]], shown: list[dict[str, Any]], open_turn: bool = True) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=shown or None, add_generation_prompt=open_turn, tokenize=False, **self._kwargs
            )
            return _LONE_SURROGATE.sub("\ufffd", text)
        except TemplateError as error:
            problem, fix = f"the chat template refuses the conversation ({error})", "use another chat template."
            raise ModelError(problem, where=str(self._tokenizer.name_or_path), fix=fix) from None

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
        probe = f'{first}"\n{second}'
        escaped = json.dumps(probe) in self._render([*messages[:2], {"role": "tool", "content": probe}], self._schemas)
        return Glue(turn_end, before, between, after, as_json=escaped)

    def _split_turn_end(self, opening: str) -> tuple[str, str]:
        """Part the text behind an assistant turn into its end-of-turn token and the rest.

        Where the template closes a turn by the next role's token alone, that token is what the policy samples last.
        """
        eos = self._tokenizer.eos_token
        if eos and eos in opening:
            head, tail = opening.split(eos, 1)
            return head + eos, tail
        first = self._special.search(opening) if self._special else None
        end = first.end() if first else 0
        return opening[:end], opening[end:]


def _fair_share(lengths: Sequence[int], room: int) -> int:
    """The largest cap under which ``lengths`` add up to ``room`` at most."""
    left = len(lengths)
    for length in sorted(lengths):
        if length * left > room:
            break
        room, left = room - length, left - 1
    return room // max(left, 1)


def _broken(match: re.Match[str]) -> str:
    found = match.group()
    return f"{found[0]} {found[1:]}"


def _is_structure(token: Any) -> bool:
    """Whether an added token is control or markup, and not a word that someone added to the vocabulary."""
    return len(token.content) > 1 and (token.special or bool(_MARKUP.search(token.content)))


def _special_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches every token that is structure, of two characters or more."""
    added = getattr(tokenizer, "added_tokens_decoder", {}) or {}
    names = {str(token.content) for token in added.values() if _is_structure(token)}
    names |= {name for name in tokenizer.all_special_tokens if len(name) > 1}
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None
