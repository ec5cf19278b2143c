"""Which characters of an assistant turn are trained: the loss policies of the cold start.

=====================  ================================================================================
``action_only``        the actions: blocks of calls, the stop marker with an answer behind it, turn ends
``action+final_think`` the actions, and the thought of the last turn
``all_assistant``      everything that the assistant wrote
=====================  ================================================================================

RLTR is ambiguous here: section 3.3 masks what tools return and nothing else, appendix A.1 trains "the action component
and the reasoning phase just before the final answer". :data:`DEFAULT_LOSS` is 3.3, the mask that RL has as well; why,
says docs/coldstart.md.

A turn that neither calls nor stops is an answer, hence an action. White space between two trained stretches is trained
with them, since it belongs to how actions are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from rltr_verl.call_styles import TAGGED
from rltr_verl.errors import ConfigError
from rltr_verl.parsing import STOP_MARKER

LossPolicy = Literal["action_only", "action+final_think", "all_assistant"]
LOSS_POLICIES: tuple[LossPolicy, ...] = get_args(LossPolicy)
DEFAULT_LOSS: LossPolicy = "all_assistant"

Stretch = tuple[int, int]
"""Characters ``start <= position < end`` of a turn's text."""

_MARK = re.compile(
    "|".join(
        [
            "(?P<think><think>)|(?P<close></think>)",
            f"(?P<answer>{re.escape(STOP_MARKER)}(?s:.*?</answer>)?)",
            *(f"(?P<style{index}>{style.opening})" for index, style in enumerate(TAGGED)),
        ]
    )
)
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(strict=False)


def read_loss(value: object, where: str = "data.rltr_loss") -> LossPolicy:
    """The policy that a setting names; None is the default.

    Raises:
        ConfigError: no policy has that name.
    """
    if value is None:
        return DEFAULT_LOSS
    for policy in LOSS_POLICIES:
        if value == policy:
            return policy
    raise ConfigError(f"no loss policy {value!r}", where=where, fix=f"policies: {', '.join(LOSS_POLICIES)}.")


def trained_stretches(text: str, policy: LossPolicy, *, is_last: bool, prefilled_think: bool = False) -> list[Stretch]:
    """The trained characters of a turn, in order and apart from each other.

    Args:
        text: what the assistant wrote, without the end-of-turn token (which is always trained).
        policy: see the module.
        is_last: the turn is the conversation's last one.
        prefilled_think: the prompt already opened the thought.
    """
    if policy == "all_assistant":
        return [(0, len(text))] if text else []
    thoughts, actions = _parts(text, prefilled_think)
    visible = [_stripped(text, *stretch) for stretch in _outside(thoughts, len(text))]
    kept = actions or visible
    return _joined(text, kept + thoughts if policy == "action+final_think" and is_last else kept)


def _parts(text: str, prefilled_think: bool) -> tuple[list[Stretch], list[Stretch]]:
    """Thoughts and actions, read in one pass as :mod:`rltr_verl.parsing` reads them: neither is found in the other."""
    thoughts, actions = list[Stretch](), list[Stretch]()
    at = _thought_end(text, 0) if prefilled_think else 0
    if at:
        thoughts.append((0, at))
    while match := _MARK.search(text, at):
        start, at = match.span()
        if match.lastgroup == "think":
            at = _thought_end(text, at)
            thoughts.append((start, at))
        elif match.lastgroup == "close":  # nothing opened it: all before was thought
            thoughts, actions = [(0, at)], []
        else:
            at = at if match.lastgroup == "answer" else _block_end(text, match)
            actions.append((start, at))
    return thoughts, actions


def _thought_end(text: str, at: int) -> int:
    closing = text.find("</think>", at)
    return closing + len("</think>") if closing >= 0 else len(text)


def _outside(stretches: Iterable[Stretch], length: int) -> Iterator[Stretch]:
    at = 0
    for start, end in stretches:
        if at < start:
            yield at, start
        at = end
    if at < length:
        yield at, length


def _block_end(text: str, opening: re.Match[str]) -> int:
    """Where a block of calls ends. JSON in it decides what is a string, so a string may hold the closing tag."""
    style = TAGGED[int((opening.lastgroup or "style0").removeprefix("style"))]
    closing = re.compile(style.closing).search(text, _behind_json(text, opening.end()))
    return closing.end() if closing else len(text)


def _behind_json(text: str, at: int) -> int:
    """Behind the JSON values that begin at ``at``; ``at`` itself where there is none."""
    while True:
        space = _SPACE.match(text, at)
        try:
            _, at = _DECODER.raw_decode(text, space.end() if space else at)
        except (ValueError, RecursionError):
            return at


def _stripped(text: str, start: int, end: int) -> Stretch:
    body = text[start:end]
    return start + len(body) - len(body.lstrip()), start + len(body.rstrip())


def _joined(text: str, stretches: Iterable[Stretch]) -> list[Stretch]:
    """In order, and one where only white space lies between; likewise up to the end of the turn."""
    joined: list[Stretch] = []
    for start, end in sorted(stretch for stretch in stretches if stretch[0] < stretch[1]):
        if joined and not text[joined[-1][1] : start].strip():
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    if joined and not text[joined[-1][1] :].strip():
        joined[-1] = (joined[-1][0], len(text))
    return joined
