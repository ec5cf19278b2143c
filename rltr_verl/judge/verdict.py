"""A judge's reply -> verdict. The only verdict parser.

A vote is 0 (incomplete) or 1 (complete); nothing is rounded, clipped or guessed. In order:

1. Reasoning (``<think>``) is dropped; full-width characters become ASCII. 2. Anchored verdicts: a verdict key of a
JSON object, ``[[1]]``, ``\\boxed{1}``, or a label such as "Score: 1" or "结论：1". The last one counts. If its value is
not a verdict ("Score: 0.9", "[[90]]"), the reply has none. 3. A line that is nothing but 0 or 1: the first or the
last one. 4. Words: "complete", "完整", their negations, a leading "yes" or "no". All of them must agree, and a hedge
beside one ("cannot tell whether", "可能", "是否") leaves the reply without a verdict.

Numbers elsewhere in the text (counts, percentages, HTTP codes, list numbering) are never read.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal[0, 1]

_TAIL = 20_000
_MAX_OBJECTS = 64
"""Bounds on the work for a reply that a judge would not write."""

_STRONG = (
    r"final[ _](?:score|verdict|answer|rating|decision|judge?ment|result)|score|verdict|conclusion|rating|judge?ment"
    r"|decision|is[ _]complete|completeness|complete"
    r"|最终评分|评分|得分|分数|打分|结论|判断|判定|评价|是否完整|完整性|完整"
)
_WEAK = r"answer|output|result|vote|label|结果|答案|输出"
"""A judge also speaks of the results of tools: these count as labels only in JSON or at the start of a line."""

_JSON_KEY = re.compile(rf"(?:{_STRONG}|{_WEAK})", re.IGNORECASE)
_QUOTES = r"[\"'“”‘’*`_\s]{0,20}"
_LABEL = re.compile(
    rf"(?:(?<![a-z_])({_STRONG}){_QUOTES}(?::|=|\bis\b|为|是(?!否))"
    rf"|^[*_#>\-\s]{{0,9}}({_WEAK}){_QUOTES}[:=]){_QUOTES}(?=\S)",
    re.IGNORECASE | re.MULTILINE,
)
_BRACKETS = re.compile(r"\[\[([^\[\]\n]{0,40})\]\]|\\boxed\{([^{}\n]{0,40})\}")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_BARE = re.compile(r"\s*(?:[-*>#]+\s+)?[*_`\"'“(\[]*([01])(?:\.0+)?\s*分?[*_`\"'”)\].。\s]*")
_NOT_BINARY = re.compile(r"\s*(?:%|-\d|\.\d|(?:/|out of\b|of\b)(?!\s*1(?![\d.])))", re.IGNORECASE)

_CLAUSE = re.compile(r"[.!?](?=\s|$)|[;,:\n。！？；，：]|\b(?:but|however)\b|但|然而", re.IGNORECASE)
_END = r"(?=[\s*_\"'”)]*(?:$|\b(?:and|because|since|as|for|so|with|given|overall|now|plan|trajectory|sequence)\b))"
_WORD = re.compile(
    rf"(?P<no>\bincomplete\b{_END}|\bunfinished\b{_END}|\bpartial(?:ly)?\b|部分完[成整])"
    rf"|(?P<yes>\bcomplete\b{_END}|完整(?![性地]|的[^\s*\"'”)]))"
    rf"|(?P<done>\bcompleted?\b|完成|完全)",
    re.IGNORECASE,
)
_NEAR_NOT = re.compile(
    r"(?:(?:\bnot|n't|\bnever)(?:\s+(?!only\b)[\w'-]+){0,3}\s*|[不未没][^不未没非]{0,3})$", re.IGNORECASE
)
_ANY_NOT = re.compile(
    r"\b(?:not|no|never|nor|neither|without|hardly|barely|lacks?|far from|nothing|none)\b|n't|[不未没无非]",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\b(?:unsure|unclear|uncertain|whether|if|may|might|maybe|perhaps|possibly|could|would|should|depends?|almost"
    r"|nearly|mostly|cannot|can't|can not|unable|hard to|difficult to|not sure|either|only)\b"
    r"|无法|不能|不确定|难以|可能|也许|是否|如果|不清楚|几乎|基本|只有",
    re.IGNORECASE,
)
_SHORT = re.compile(
    r"[\s*_\"'“]*(?:(?P<yes>yes|true|pass(?:ed)?|是的?|对|通过|合格|已?完成)"
    r"|(?P<no>no|false|fail(?:ed)?|否|不是|错|[不未]通过|不合格))[\s*_\"'”]*(?=$|[.,;:!。，；：！])",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class _Anchor:
    """A verdict at its place in the reply; ``value`` is None where the place holds no verdict."""

    position: int
    value: Verdict | None


def parse_verdict(text: Any) -> Verdict | None:
    """Verdict of a judge's reply: 1 (complete), 0 (incomplete), or None if it holds no readable verdict.

    Args:
        text: the reply's visible content; anything but a string gives None. Never raises on any text.
    """
    if not isinstance(text, str):
        return None
    visible = _visible(unicodedata.normalize("NFKC", text))
    anchors, rest = _json_anchors(visible)
    anchors += _text_anchors(rest)
    if anchors:
        return max(anchors, key=lambda anchor: anchor.position).value
    lines = [line for line in rest.splitlines() if line.strip()]
    bare = {_bare(line) for line in (lines[:1] + lines[-1:])} - {None}
    if bare:
        return bare.pop() if len(bare) == 1 else None
    return _words(rest)


def _visible(text: str) -> str:
    """The part after the reasoning; empty if the reasoning never ended."""
    after = text.rpartition("</think>")[2]
    return after.partition("<think>")[0][-_TAIL:]


def _json_anchors(text: str) -> tuple[list[_Anchor], str]:
    """Verdict keys of the JSON objects, and the text with those objects blanked (their strings are no verdicts)."""
    anchors: list[_Anchor] = []
    position, kept = 0, []
    for _ in range(_MAX_OBJECTS):
        start = text.find("{", position)
        if start < 0:
            break
        try:
            value, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            kept.append(text[position : start + 1])
            position = start + 1
            continue
        anchors += _object_anchor(value, start)
        kept.append(text[position:start] + " " * (end - start))
        position = end
    return anchors, "".join(kept) + text[position:]


def _object_anchor(pairs: list[tuple[str, Any]], position: int) -> list[_Anchor]:
    found = [_json_value(value) for value in _verdict_values(pairs)]
    if not found:
        return []
    return [_Anchor(position, found[0] if len(set(found)) == 1 else None)]


class _Pairs(list):  # type: ignore[type-arg]
    """A decoded JSON object, every pair kept, so that a key given twice is seen twice."""


def _verdict_values(pairs: list[tuple[str, Any]]) -> Iterator[Any]:
    for key, value in pairs:
        if isinstance(value, _Pairs):
            yield from _verdict_values(value)
        elif _JSON_KEY.fullmatch(key.strip()):
            yield value


def _json_value(value: Any) -> Verdict | None:
    if isinstance(value, bool):
        return 1 if value else 0
    if isinstance(value, (int, float)):
        return _binary(value)
    return _value(value) if isinstance(value, str) else None


_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_Pairs, parse_int=float)


def _text_anchors(text: str) -> list[_Anchor]:
    anchors = [_Anchor(match.start(), _value(match[1] or match[2] or "")) for match in _BRACKETS.finditer(text)]
    for match in _LABEL.finditer(text):
        rest = _first_line(text, match.end())
        if _is_adjective(match, text) or _BRACKETS.match(rest):
            continue
        if _NUMBER.match(rest) or _tells(rest):
            anchors.append(_Anchor(match.start(), _value(rest)))
    return anchors


def _first_line(text: str, start: int) -> str:
    return text[start : start + 200].split("\n", 1)[0]


def _is_adjective(match: re.Match[str], text: str) -> bool:
    """ "The plan is not complete: 1 search is missing": here "complete" is the verdict, not a label of the number."""
    if (match[1] or "").lower() not in ("complete", "完整"):
        return False
    line = text[max(0, match.start() - 200) : match.start()].rpartition("\n")[2]
    return bool(line.strip("\"'“”*`_#>- \t{,"))


def _value(text: str) -> Verdict | None:
    """Verdict at the start of ``text``: a number that is exactly 0 or 1, else the words of its first clause."""
    text = text.strip()
    number = _NUMBER.match(text)
    if not number:
        return _words(_CLAUSE.split(text, maxsplit=1)[0])
    return None if _NOT_BINARY.match(text, number.end()) else _binary(float(number[0]))


def _binary(number: float) -> Verdict | None:
    return {0.0: 0, 1.0: 1}.get(float(number))  # type: ignore[return-value]


def _bare(line: str) -> Verdict | None:
    match = _BARE.fullmatch(line)
    return None if match is None else (1 if match[1] == "1" else 0)


def _tells(text: str) -> bool:
    """Whether the first clause says something about completeness, be it only that it cannot be told."""
    first = _CLAUSE.split(text, maxsplit=1)[0]
    return bool(_WORD.search(first) or _SHORT.match(first) or _HEDGE.search(first))


def _words(text: str) -> Verdict | None:
    """The verdict that all verdict words agree on; None without one, with a hedge, or where they contradict."""
    short = _SHORT.match(text)
    found: set[Verdict | None] = {1 if short["yes"] else 0} if short else set()
    for clause in _CLAUSE.split(text[short.end() :] if short else text):
        for match in _WORD.finditer(clause):
            found |= _word(match, clause)
    return found.pop() if len(found) == 1 else None


def _word(match: re.Match[str], clause: str) -> set[Verdict | None]:
    """What one verdict word says in its clause; nothing for "completed" unless it is negated."""
    before = clause[: match.start()][-100:]
    near = _NEAR_NOT.search(before)
    if match["done"]:
        return {0} if near and not _HEDGE.search(clause) else set()
    if _HEDGE.search(clause) or (_ANY_NOT.search(before) and not (near and match["yes"])):
        return {None}
    return {0} if match["no"] or near else {1}
