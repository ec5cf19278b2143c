"""Are exactly the sampled tokens trained? A trajectory's text against the ids and the mask that the loss will use.

The check starts from the recorded trajectory and says what the ids behind the prompt must look like:

* as many trained spans as there are turns with text, each decoding to exactly what the policy wrote;
* between two of them nothing but the observations of the turn before, each once and in order, inside the template's
  glue: the very ids that the template makes of the recorded texts;
* no control token inside an observation, nothing before the first span, nothing behind the last.

So every id of a response is accounted for. Another question is whether rendering the whole conversation afresh would
give the same ids (:func:`find_divergence`). It need not: a policy may sample a text in other tokens than the tokenizer
would choose, and some templates drop earlier thoughts. The sampled ids are what trains; the divergence is reported.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rltr_verl.errors import ModelError
from rltr_verl.masks import Span, spans_of
from rltr_verl.rollout.template import ChatTemplate
from rltr_verl.trajectory import Trajectory, Turn

_SHOWN = 60
_RETOKENISED = "the policy sampled other tokens for the same text"


@dataclass(frozen=True)
class MaskFault:
    """One breach.

    ``kind`` is ``lengths``, ``mask_values``, ``spans``, ``model_text``, ``context``, ``control_token`` or ``prompt``.
    ``position`` counts ids behind the prompt (for ``prompt``: from its start); ``turn`` counts from 0.
    """

    kind: str
    position: int
    problem: str
    turn: int | None = None

    def __str__(self) -> str:
        turn = "" if self.turn is None else f"turn {self.turn}, "
        return f"{turn}token {self.position}: {self.problem} ({self.kind})"


@dataclass(frozen=True)
class Divergence:
    """Where the ids behind the prompt leave those of a fresh rendering, and why."""

    position: int
    turn: int
    why: str


def check_masks(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    response_mask: Sequence[int],
    trajectory: Trajectory,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]] | None = None,
) -> list[MaskFault]:
    """All breaches of a trajectory's mask, the first ones first; empty if exactly the sampled ids are trained.

    Args:
        prompt_ids: ids before the response.
        response_ids: ids behind the prompt, without padding.
        response_mask: 1 where an id is trained.
        trajectory: what the rollout recorded; its observations are the texts that the model saw.
        template: the tokenizer's chat template, with the arguments of the run.
        messages: the conversation of the prompt; where given, ``prompt_ids`` must be its rendering.
    """
    shape = _shape_fault(response_ids, response_mask)
    if shape:
        return [shape]
    prompt = _prompt_fault(prompt_ids, messages, trajectory, template)
    return [*([prompt] if prompt else []), *_response_faults(response_ids, response_mask, trajectory, template)]


def _shape_fault(ids: Sequence[int], mask: Sequence[int]) -> MaskFault | None:
    if len(ids) != len(mask):
        return MaskFault("lengths", min(len(ids), len(mask)), f"{len(ids)} ids stand beside {len(mask)} mask values")
    odd = next((at for at, value in enumerate(mask) if value not in (0, 1)), None)
    return None if odd is None else MaskFault("mask_values", odd, f"a mask value is {mask[odd]!r}, not 0 or 1")


def _prompt_fault(
    ids: Sequence[int],
    messages: Sequence[Mapping[str, Any]] | None,
    trajectory: Trajectory,
    template: ChatTemplate,
) -> MaskFault | None:
    if messages is None:
        return None
    expected = template.prompt_ids(messages, trajectory.tools)
    at = first_difference(ids, expected)
    if at is None:
        return None
    what = "the prompt is not what the template makes of it"
    return MaskFault("prompt", at, _compared(what, template, expected, ids, at))


def _response_faults(
    ids: Sequence[int], mask: Sequence[int], trajectory: Trajectory, template: ChatTemplate
) -> Iterator[MaskFault]:
    written = [(number, turn) for number, turn in enumerate(trajectory.turns) if turn.text]
    spans = spans_of(mask)
    if spans and written and not spans[0].trained:
        yield MaskFault("spans", 0, "the response does not begin with what the policy wrote", written[0][0])
    trained = [span for span in spans if span.trained]
    if len(trained) != len(written):
        at = trained[len(written)].start if len(trained) > len(written) else len(ids)
        yield MaskFault("spans", at, f"{len(trained)} spans are trained, {len(written)} turns were written")
    for index, ((number, turn), span) in enumerate(zip(written, trained, strict=False)):
        following = trained[index + 1].start if index + 1 < len(trained) else len(ids)
        yield from _text_fault(ids, span, number, turn, template)
        yield from _context_faults(ids, (span, following), number, trajectory, template)


def _text_fault(ids: Sequence[int], span: Span, number: int, turn: Turn, template: ChatTemplate) -> Iterator[MaskFault]:
    sampled = ids[span.start : span.end]
    text = template.decode(sampled)
    if text == turn.text:
        return
    common = len(os.path.commonprefix([text, turn.text]))
    at = bisect.bisect_right(range(len(sampled) + 1), common, key=lambda n: len(template.decode(sampled[:n]))) - 1
    problem = f"the trained text is {_excerpt(text, common)}, the policy wrote {_excerpt(turn.text, common)}"
    yield MaskFault("model_text", span.start + at, problem, number)


def _context_faults(
    ids: Sequence[int], place: tuple[Span, int], number: int, trajectory: Trajectory, template: ChatTemplate
) -> Iterator[MaskFault]:
    """What stands behind a turn: its observations if another turn follows, else nothing."""
    span, following = place
    found = list(ids[span.end : following])
    last = number + 1 == len(trajectory.turns)
    ended = template.ends_turn(ids[span.start : span.end])
    texts = [item.text for item in trajectory.turns[number].observations]
    expected = [] if last else template.observation_ids(texts, turn_ended=ended)
    at = first_difference(found, expected)
    if at is not None:
        problem = _compared("behind the turn stands", template, expected, found, at)
        yield MaskFault("context", span.end + at, problem, number)
        return
    glue = [] if last else template.observation_ids([""] * len(texts), turn_ended=ended)
    if _controls(found, template) != _controls(glue, template):
        yield MaskFault("control_token", span.end, "an observation holds a control token", number)


def _controls(ids: Sequence[int], template: ChatTemplate) -> int:
    return sum(item in template.control_ids for item in ids)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two sequences differ, the end of the shorter one included; None if they are equal."""
    pairs = enumerate(zip_longest(one, other))
    return next((at for at, (a, b) in pairs if a != b), None)


def _compared(what: str, template: ChatTemplate, expected: Sequence[int], found: Sequence[int], at: int) -> str:
    shown = [repr(template.decode(ids[at : at + 16])[:_SHOWN]) for ids in (found, expected)]
    return f"{what}: {shown[0]} instead of {shown[1]}"


def _excerpt(text: str, at: int) -> str:
    """``text`` around a place."""
    start = max(0, at - _SHOWN // 2)
    return repr(("..." if start else "") + text[start : at + _SHOWN // 2])


def find_divergence(
    response_ids: Sequence[int], response_mask: Sequence[int], trajectory: Trajectory, template: ChatTemplate
) -> Divergence | None:
    """The first place where a fresh rendering of the conversation has other ids than the rollout, or None.

    The rendering is of plain messages: the recorded turns without their end-of-turn token, and the observations.
    """
    rendered = _rendered(response_ids, response_mask, trajectory, template)
    if isinstance(rendered, str):
        return Divergence(0, 0, rendered)
    at = first_difference(response_ids, rendered[: len(response_ids)])  # behind it the template may close the turn
    if at is None:
        return None
    turn = sum(span.trained for span in spans_of(list(response_mask)[: at + 1])) - 1
    return Divergence(at, max(turn, 0), _why(response_ids, rendered, at, template, bool(response_mask[at])))


def _rendered(
    ids: Sequence[int], mask: Sequence[int], trajectory: Trajectory, template: ChatTemplate
) -> list[int] | str:
    """The response of a fresh rendering, or why there is none."""
    question = [{"role": "user", "content": trajectory.query}]
    start = template.prompt_ids(question, trajectory.tools)
    messages = [*question, *_messages(ids, mask, trajectory, template)]
    open_turn = not (trajectory.turns and trajectory.turns[-1].text)
    try:
        whole = template.rendered_ids(messages, trajectory.tools, open_turn=open_turn)
    except ModelError as error:
        return error.problem
    if whole[: len(start)] == start:
        return whole[len(start) :]
    same = template.decode(whole).startswith(template.decode(start))
    return _RETOKENISED if same else "the template opens a past turn otherwise than its generation prompt does"


def _messages(
    ids: Sequence[int], mask: Sequence[int], trajectory: Trajectory, template: ChatTemplate
) -> Iterator[dict[str, Any]]:
    trained = [span for span in spans_of(mask) if span.trained]
    last = trajectory.turns[-1] if trajectory.turns else None
    for turn, span in zip((turn for turn in trajectory.turns if turn.text), trained, strict=False):
        sampled = list(ids[span.start : span.end])
        text = template.decode(sampled[:-1]) if template.ends_turn(sampled) else turn.text
        yield {"role": "assistant", "content": template.opened + text}
        if turn is not last:
            yield from ({"role": "tool", "content": item.text} for item in turn.observations)


def _why(ids: Sequence[int], rendered: Sequence[int], at: int, template: ChatTemplate, sampled: bool) -> str:
    ours, theirs = template.decode(ids[at:]), template.decode(rendered[at:])
    length = min(len(ours), len(theirs), _SHOWN)
    if sampled and ours[:length] == theirs[:length]:
        return f"{_RETOKENISED}: {ours[:length]!r}"
    who = "the policy wrote" if sampled else "the rollout has"
    return f"{who} {ours[:length]!r} where the template renders {theirs[:length]!r}"
