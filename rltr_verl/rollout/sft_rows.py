"""A conversation as ids and loss mask, by the path of the rollout.

In a rollout the ids only grow: the prompt as :meth:`ChatTemplate.prompt_ids` renders it, what the policy samples in a
turn, its end-of-turn token included, what :meth:`ChatTemplate.observe` makes of the results, and so on. A stop marker
is the last id: sampling stops there, so no end of turn is sampled behind it. :func:`build_row` does the same with the
turns of a stored conversation; nothing is rendered message by message, and nothing is rendered twice.

An id is trained if all of its characters are in a stretch that the loss policy trains
(:mod:`rltr_verl.coldstart.loss`); an id that straddles the border of one is not. End-of-turn tokens are trained.
:func:`check_row` proves a row against the recorded texts, token by token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rltr_verl.coldstart.loss import LossPolicy, Stretch, trained_stretches
from rltr_verl.errors import ModelError
from rltr_verl.masks import Span, spans_of
from rltr_verl.rollout.mask_check import check_masks, first_difference
from rltr_verl.rollout.sft_turns import Conversation, RowRefused, TurnStyle, WrittenTurn, read_conversation
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.trajectory import Observation, Trajectory, Turn


@dataclass(frozen=True)
class SftRow:
    """Ids and masks of a conversation.

    Attributes:
        prompt_ids: the prompt, generation prompt included.
        ids: all ids behind the prompt.
        sampled: 1 where a policy samples the id, 0 where it is shown it; as long as ``ids``.
        mask: 1 where the id is trained; never where ``sampled`` is 0.
        conversation: the texts that they stem from; the observations as they stand in the ids.
    """

    prompt_ids: list[int]
    ids: list[int]
    sampled: list[int]
    mask: list[int]
    conversation: Conversation

    @property
    def input_ids(self) -> list[int]:
        """Prompt and response."""
        return self.prompt_ids + self.ids

    @property
    def loss_mask(self) -> list[int]:
        """The mask of :attr:`input_ids`."""
        return [0] * len(self.prompt_ids) + self.mask

    @property
    def turns(self) -> list[Span]:
        """Where in ``ids`` each turn stands; turns without any id are left out."""
        return [span for span in spans_of(self.sampled) if span.trained]

    def trajectory(self, tools: Sequence[Mapping[str, Any]]) -> Trajectory:
        """The conversation as the mask check reads it."""
        turns = [
            Turn(turn.sampled, observations=tuple(map(Observation, turn.observations)))
            for turn in self.conversation.turns
        ]
        return Trajectory(self.conversation.query, tuple(turns), tuple(map(dict, tools)))


class RowBuilder:
    """Makes rows for one chat template.

    Args:
        tokenizer: of the model that is trained.
        template: its chat template, with the run's arguments.
        policy: what is trained of a turn.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate, policy: LossPolicy) -> None:
        self.template, self.policy = template, policy
        self.style = TurnStyle(template)
        self._tokenizer = tokenizer

    def build(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, max_length: int = 0
    ) -> SftRow:
        """The row of a conversation.

        Args:
            messages: plain messages, without the keys that parquet added.
            tools: the schemas that the prompt shows.
            max_length: most ids; 0 is no limit.

        Raises:
            RowRefused: the conversation is none of a planner, or too long: cut, it would lose its end.
        """
        conversation = read_conversation(messages, self.style)
        try:
            prompt = self.template.prompt_ids(conversation.prompt, list(tools or ()))
        except ModelError as error:
            raise RowRefused("template", error.problem) from None
        row = self._grown(prompt, conversation)
        length = len(row.prompt_ids) + len(row.ids)
        if 0 < max_length < length:
            raise RowRefused("too_long", f"{length} tokens, {max_length} allowed: it would lose its end")
        if not any(row.mask):
            raise RowRefused("trains_nothing", f"no token is trained under {self.policy}")
        return row

    def _grown(self, prompt: list[int], conversation: Conversation) -> SftRow:
        ids, sampled, mask, turns = list[int](), list[int](), list[int](), []
        for number, turn in enumerate(conversation.turns):
            is_last = number + 1 == len(conversation.turns)
            written, trained = self._written(turn, is_last)
            ids += written
            sampled += [1] * len(written)
            mask += trained
            if not is_last:
                shown, seen = self.template.observe(turn.observations, turn_ended=self.template.ends_turn(written))
                ids += shown
                sampled += [0] * len(shown)
                mask += [0] * len(shown)
                turn = WrittenTurn(turn.text, turn.end, tuple(seen))
            turns.append(turn)
        return SftRow(prompt, ids, sampled, mask, Conversation(conversation.prompt, tuple(turns)))

    def _written(self, turn: WrittenTurn, is_last: bool) -> tuple[list[int], list[int]]:
        """Ids of a turn and which of them are trained."""
        if self.policy == "all_assistant":
            ids = self.template.encode(turn.sampled)
            return ids, [1] * len(ids)
        ids, places = located(self._tokenizer, self.template, turn.sampled)
        return ids, covered(places, self.stretches(turn, is_last), len(turn.sampled))

    def stretches(self, turn: WrittenTurn, is_last: bool) -> list[Stretch]:
        """The trained characters of a turn, its end included."""
        found = trained_stretches(
            turn.text,
            self.policy,
            is_last=is_last,
            prefilled_think=self.style.opens_thought and "</think>" in turn.text,
        )
        length, end = len(turn.text), len(turn.sampled)
        if found and found[-1][1] == length:
            return [*found[:-1], (found[-1][0], end)]
        return [*found, (length, end)] if end > length else found

    def check(
        self,
        row: SftRow,
        recorded: Conversation,
        tools: Sequence[Mapping[str, Any]] | None,
        mask: Sequence[int] | None = None,
    ) -> None:
        """Prove a row: its ids are the recorded texts, and its mask trains what the policy says and nothing else.

        Args:
            row: as :meth:`build` made it.
            recorded: the texts as they were sampled and shown.
            tools: the schemas of the prompt.
            mask: of the ids behind the prompt; None is the row's own.

        Raises:
            RowRefused: kind ``prompt``, ``text``, ``control`` or ``mask``; names the first fault.
        """
        read = SftRow(row.prompt_ids, row.ids, row.sampled, row.mask, recorded).trajectory(tools or ())
        for fault in check_masks(row.prompt_ids, row.ids, row.sampled, read, self.template, recorded.prompt):
            raise RowRefused({"prompt": "prompt", "model_text": "text"}.get(fault.kind, "mask"), str(fault))
        self.check_turns(row, recorded, mask)

    def check_turns(self, row: SftRow, recorded: Conversation, mask: Sequence[int] | None = None) -> None:
        """The part of :meth:`check` that looks at the policy's own ids; three times as fast.

        Raises:
            RowRefused: kind ``text``, ``control`` or ``mask``.
        """
        mask = row.mask if mask is None else mask
        if len(mask) != len(row.ids):
            raise RowRefused("mask", f"{len(row.ids)} ids stand beside {len(mask)} mask values")
        if any(trained and not own for trained, own in zip(mask, row.sampled, strict=True)):
            raise RowRefused("mask", "an observation would be trained")
        for number, (turn, span) in enumerate(zip(recorded.turns, row.turns, strict=True)):
            self._check_text(row.ids[span.start : span.end], turn, number)
            self._check_turn(row.ids, mask, span, turn, number)

    def _check_text(self, ids: Sequence[int], turn: WrittenTurn, number: int) -> None:
        found = self.template.decode(ids)
        if found != turn.sampled:
            at = len(os.path.commonprefix([found, turn.sampled]))
            shown = [repr(text[max(0, at - 20) : at + 40]) for text in (found, turn.sampled)]
            raise RowRefused("text", f"turn {number}: the ids say {shown[0]}, the policy wrote {shown[1]}")
        if any(item in self.template.eos_ids for item in ids[:-1]):
            raise RowRefused("control", f"turn {number} holds a token that ends a turn before its end")

    def _check_turn(self, ids: Sequence[int], mask: Sequence[int], span: Span, turn: WrittenTurn, number: int) -> None:
        is_last = span.end == len(ids)
        found = list(mask[span.start : span.end])
        whole = self.policy == "all_assistant"
        expected = [1] * len(found) if whole else self._written(turn, is_last)[1]
        at = first_difference(found, expected)
        problem = f"token {at} is {'not ' * (not found[at])}trained" if at is not None else None
        problem = problem or (None if whole else self._misplaced(ids, found, span, self.stretches(turn, is_last)))
        if problem:
            raise RowRefused("mask", f"turn {number}: {problem}")

    def _misplaced(
        self, ids: Sequence[int], mask: Sequence[int], span: Span, stretches: Sequence[Stretch]
    ) -> str | None:
        """Decode up to the ends of each run: what is trained is the policy's, and nothing of that is left out but the
        ids at the borders."""
        for run in spans_of(mask):
            at, end = (self._characters(ids, span, place) for place in (run.start, run.end))
            if run.trained and not any(start <= at and end <= stop for start, stop in stretches):
                return f"characters {at} to {end} are trained, and are none of the policy's"
            first, last = (self._characters(ids, span, place) for place in (run.start + 1, run.end - 1))
            if not run.trained and any(max(start, first) < min(stop, last) for start, stop in stretches):
                return f"characters {at} to {end} are not trained, and are the policy's"
        return None

    def _characters(self, ids: Sequence[int], span: Span, place: int) -> int:
        """How many characters of the turn stand before its id ``place``."""
        return len(self.template.decode(ids[span.start : span.start + place]))


def covered(places: Sequence[Stretch], stretches: Sequence[Stretch], length: int) -> list[int]:
    """1 for each place that lies within the stretches with all of its characters (at least one), else 0."""
    kept = [0] * length
    for start, end in stretches:
        kept[start:end] = [1] * (end - start)
    total = list(accumulate(kept, initial=0))
    return [int(start < end and total[end] - total[start] == end - start) for start, end in places]


def located(tokenizer: Any, template: ChatTemplate, text: str) -> tuple[list[int], list[Stretch]]:
    """Ids of a text and where in it each one stands; the ids of one character stand in the same place."""
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(found["input_ids"]), [(start, end) for start, end in found["offset_mapping"]]
    ids = template.encode(text)
    ends = [len(template.decode(ids[: at + 1])) for at in range(len(ids))]
    return ids, list(zip([0, *ends], ends, strict=False))
