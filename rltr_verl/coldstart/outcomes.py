"""What became of an attempt: a trajectory to go on with, an empty one, a refusal, or the same turns once more."""

from __future__ import annotations

import hashlib
import json
import re

from rltr_verl.coldstart.records import Outcome
from rltr_verl.data.pool import folded
from rltr_verl.trajectory import Trajectory, Turn

_CHARS = 400
"""A text that declines does so near its start; what a long text says later is its subject."""
_SHOWN = 80

_APOSTROPHES = str.maketrans(dict.fromkeys("\u2018\u2019\u201b\u02bc\u0060\u00b4\uff07", "'"))
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_MARKER = re.compile(r"</?answer>")

_VERB = (
    r"(?:help(?! but\b)|assist|comply|fulfil|provide|do (?:that|this|so)|answer|engage|support|creat|generat|continue"
    r"|discuss|share|offer|give|participat|complet|process|writ|perform|respond|access|brows|fulfill|accommodate"
    r"|search (?:the )?(?:web|internet|online))"
)
_CANNOT = (
    r"(?:can't|cannot|can not|cant|won't|will not|(?:'m|am|are|'re|be) (?:unable|not able|not allowed|not permitted))"
)
_ENGLISH = (
    rf"\b(?:sorry|apologi[sz]e|apologies|regret|afraid|unfortunately|regrettably)\b[^.!?]{{0,80}}?"
    rf"(?:{_CANNOT}|\bdecline|\brefuse|not comfortable|not possible)",
    rf"\b(?:i|we)(?: \w+)? ?{_CANNOT}(?: be able)?(?: to)?(?: \w+ly)? {_VERB}",
    rf"^(?:unable|not able|not allowed|not permitted) to {_VERB}",
    r"\bas an? (?:\w+ )?(?:ai|artificial intelligence|language model|llm)\b[^.!?]{0,160}?"
    r"(?:\bnot\b|n't\b|\bcannot\b|\bunable\b|\bdecline)(?! (?:need|require|necessary|have to))",
    r"\bi (?:must |have to |need to |will have to )?(?:respectfully |politely )?(?:decline|refuse)\b",
    r"\b(?:against|violat\w+) (?:my|our|the|\w+'s) (?:\w+ )?(?:guidelines|policy|policies|programming|principles)",
)
_NO_ZH = "(?:无法|無法|不能|不可以|没办法|沒辦法|没法|沒法|不便|不会|不會|拒绝|拒絕|难以|難以)"
_CHINESE = (
    rf"(?:抱歉|对不起|對不起|很遗憾|很遺憾|不好意思|恕)[^。!?]{{0,40}}?{_NO_ZH}",
    rf"我(?:们|們)?(?:暂时|暫時|目前|现在|現在|实在|實在)?{_NO_ZH}(?:[为為向给給对對][您你])?"
    "(?:提供|回答|帮|幫|协助|協助|满足|滿足|完成|处理|處理|讨论|討論|支持|给出|給出|继续|繼續|参与|參與|执行|執行|生成|遵从|遵從|配合|访问|訪問|解答|透露)",
    "作[为為](?:一[个個名款种種])?(?:人工智能|人工智慧|ai|大?型?[语語]言模型|智能助手)[^。!?]{0,40}?"
    rf"(?:{_NO_ZH}|没有|沒有|不具备|不具備)",
)
_DECLINES = re.compile("|".join((*_ENGLISH, *_CHINESE)))


def classify(trajectory: Trajectory) -> tuple[Outcome, str | None]:
    """``ok``, ``empty`` or ``refusal``, and the reason where it is not ``ok``.

    Only a trajectory without any call, readable or not, can be one of the last two: a refusal if its text declines, in
    English or Chinese; empty if it has no text and no stop marker. What stands inside of a thought counts for nothing.
    A planner that stops at once is ``ok``: there are queries that need no tool.
    """
    if any(turn.calls for turn in trajectory.turns):
        return Outcome.OK, None
    text = _plain(" ".join(map(visible, trajectory.turns)))
    if declines(text):
        return Outcome.REFUSAL, f"declines: {text[:_SHOWN]}"
    if not text and not any(turn.stopped for turn in trajectory.turns):
        thought = any(turn.thought for turn in trajectory.turns)
        return Outcome.EMPTY, "nothing but a thought" if thought else "no text"
    return Outcome.OK, None


def declines(text: str) -> bool:
    """Whether a text, as said to the user, turns the request down."""
    return _DECLINES.search(_plain(text)) is not None


def visible(turn: Turn) -> str:
    """What a turn without calls says outside of its thought, the text before and behind the stop marker."""
    if not turn.stopped:
        return turn.answer or ""
    return _MARKER.sub(" ", _THOUGHT.sub("", turn.text).rpartition("</think>")[2])


def turns_digest(query: str, trajectory: Trajectory) -> bytes:
    """16 bytes that two trajectories of a query share if they have the same turns.

    Calls are compared by :meth:`rltr_verl.trajectory.ToolCall.key`, texts (thoughts too) with their whitespace
    collapsed. What the tools returned is not compared: the policy did not write it.
    """
    turns = [[_text(turn), *(call.key() for call in turn.calls)] for turn in trajectory.turns]
    text = json.dumps([query, turns])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _text(turn: Turn) -> str:
    """The turn's text without its calls."""
    text = turn.text
    for call in turn.calls:
        text = text.replace(call.raw, "", 1)
    return " ".join(text.split())


def _plain(text: str) -> str:
    return folded(text[: 10 * _CHARS].translate(_APOSTROPHES))[:_CHARS]
