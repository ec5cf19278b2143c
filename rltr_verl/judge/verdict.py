"""A judge's reply -> verdict, reason or grade. The only parser of judge replies.

A vote is 0 (incomplete) or 1 (complete); nothing is rounded, clipped or guessed. In order:

1. Reasoning (``<think>``) is dropped; full-width characters become ASCII.
2. Anchored verdicts: a verdict key of a JSON object, ``[[1]]``, ``\\boxed{1}``, ``<score>1</score>``, or a label such
   as "Score: 1" or "结论：1". All that hold a verdict must agree, but a final one ("Final score:", "最终评分：", "on
   reflection, ...") overrules those before it, and a JSON object overrules labels. If the value of the last one is not
   a verdict ("Score: 0.9", "[[90]]"), the reply has none. A label quoted with its value ('it says "score: 1"') is a
   mention.
3. A line that is nothing but 0 or 1: the first or the last one.
4. Words: "complete", "完整", their negations, a leading "yes" or "no", an answer to the judge's own question. All must
   agree, and a hedge beside one ("cannot tell whether", "可能", "是否") leaves the reply without a verdict.

Numbers elsewhere in the text (counts, percentages, HTTP codes, list numbering) are never read. Work is bounded: the
last 20,000 characters count.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal[0, 1]

_TAIL = 20_000
_MAX_OBJECTS = 64
"""Bounds on the work for a reply that a judge would not write."""
_REASON_CHARS = 500

_THINK_OPEN = re.compile(r"<(?:think|thinking|thought|reasoning|analysis)>|\[think\]|◁think▷", re.IGNORECASE)
_THINK_CLOSE = re.compile(r"</(?:think|thinking|thought|reasoning|analysis)>|\[/think\]|◁/think▷", re.IGNORECASE)

_FINAL_WORD = (
    r"(?:my\s+|the\s+)?final|overall|revised|corrected|on reflection|on second thought|correction|actually|wait"
    r"|最终|最終|最后|最後|更正|修正"
)
_FINAL = re.compile(rf"\b(?:{_FINAL_WORD})", re.IGNORECASE)
_PAIRED = {'"': '"', "'": "'", "“": "”", "‘": "’", "`": "`", "「": "」"}
LABELS = (
    r"(?:final|overall)[ _]?(?:score|verdict|answer|rating|decision|judge?ment|result)|final|score|verdict|conclusion"
    r"|rating|judge?ment|decision|is[ _]?complete|completeness[ _]?(?:score|verdict|rating)|completeness|complete"
    r"|(?:最[终終后後])?(?:[评評][分价價]|得分|分[数數]|打分|[结結][论論]|(?:判[断斷定]|[评評][判估定])(?:[结結]果)?)|最[终終]"
    r"|是否完整|完整性|完整"
)
WEAK_LABELS = r"answer|output|result|vote|label|[结結]果|答案|[输輸]出"
"""A judge also speaks of the results of tools: these count as labels only in JSON or at the start of a line.

These patterns also say what :mod:`rltr_verl.judge.neutral` disarms.
"""

_STRONG_KEY = re.compile(LABELS, re.IGNORECASE)
_JSON_KEY = re.compile(rf"(?:{LABELS}|{WEAK_LABELS})", re.IGNORECASE)
_REASON_KEY = re.compile(
    r"(?:short_|brief_)?(?:reasons?|reasoning|explanation|rationale|justification|analysis|comment)|理由|原因|分析|[说說]明",
    re.IGNORECASE,
)
GAP = r"[\"'“”‘’*`_\s✅❌✔✖☑❎\ufe0f]{0,20}"
SCALE = r"(?:[(\[]\s?(?:0\s?(?:/|-|or|或|,)\s?1|1\s?(?:/|or|或|,)\s?0)\s?[)\]])?"
EQUALS = r"(?::|=>|=|->|→|\bis\b:?|[为為]:?|是(?!否):?|\s[-–—](?=\s))"
_LABEL = re.compile(
    rf"(?:(?<![a-z_])({LABELS}){GAP}{SCALE}{GAP}{EQUALS}"
    rf"|^[*_#>\-\s]{{0,9}}({WEAK_LABELS}){GAP}[:=]){GAP}(?=\S)",
    re.IGNORECASE | re.MULTILINE,
)
_BRACKETS = re.compile(
    r"\[\[([^\[\]\n]{0,40})\]\]|\\boxed\{(?:\\text\{)?([^{}\n]{0,40})\}"
    rf"|<(?:{LABELS}|{WEAK_LABELS})>([^<>]{{0,40}})</",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_ONE_DIGIT = re.compile(r"[-+]?0(?:\.0+)?|\+?1(?:\.0+)?")
_BARE = re.compile(
    r"\s*(?:[-*>#]+\s+)?[*_`\"'“(\[]*([01])(?:\.0+)?(?:\s*/\s*1)?\s*分?[*_`\"'”)\]。\s]*"
    r"(?:[,;:–—-]\s*(?:because\b|since\b|as\b|due to\b|因[为為]|由于|由於).*)?",
    re.IGNORECASE,
)
_BEYOND = re.compile(
    r"[\ufe0f\u20e3+^]|\*\d|[-.,~]\d|\s*(?:%|[-–~]\s?\d|(?:/\s*1\s*)?\?"
    r"|(?:分|points?)?\s*[(\[]?\s*(?:/(?!/)|out of\b|of\b|in\b|[满滿总總]分(?:为|為|是)?:?)(?!\s*1(?!\d|\.\d)))",
    re.IGNORECASE,
)
"""After a number: it is part of a larger one, or of a scale other than 0 to 1."""
_ALONE = re.compile(
    r"\s*(?:分|points?\b)?\s*(?:$|[^\w\s]|(?:/|out of|of)\s*1|(?:because|since|as|for|due|and|with|given|so|but|meaning"
    r"|indicating|(?:in|not )?complete|reason|explanation|justification|note|score|verdict)\b"
    r"|[因由表即代故]|理由|原因|[说說]明|[结結][论論]|不?完整)",
    re.IGNORECASE,
)
"""After a number: it counts nothing ("1 call is missing")."""
_LIST = re.compile(r"[01][.、)](?:\s+|(?<=、))\S")
_NEXT_ITEM = re.compile(r"(?:^|[\s;；。])2[.、)]", re.MULTILINE)
_LEGEND = re.compile(rf"(?:incomplete|不完整){GAP}(?:[:=为為]|is\b|->|→){GAP}[01]", re.IGNORECASE)
_FIELD = re.compile(
    r"[\"']([^\"'\\\n]{1,40})[\"']\s{0,9}:\s{0,9}(?:\"(?:[^\"\\]+|\\.)*(?:\"|\\?$)|'(?:[^'\\]+|\\.)*(?:'|\\?$))",
    re.DOTALL,
)

_CLAUSE = re.compile(r"([.!](?=\s|$)|[?;,:\n。！？；，：]|\b(?:but|however)\b|但|然而)", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!?](?=\s|$)|[。！？\n]")
_MAPPED = re.compile(r"(?:\(|->|→|=>|=)\s*([01])(?![\d.])|\s([01])\s*$")
_END = (
    r"(?=[^\w\n]*(?:$|\b(?:and|because|since|as|for|so|with|given|overall|now|plan|trajectory|sequence)\b"
    r"|(?<=[(>→=\s])[01](?:\W|$)))"
)
_WHOLE = "完[整备備]"
_WORD = re.compile(
    rf"(?P<no>\bincomplete\b{_END}|\bunfinished\b{_END}|\bpartial(?:ly)?\b|部分完[成整])"
    rf"|(?P<yes>\bcomplete\b{_END}|{_WHOLE}(?![性度地为為]|的[^\s*\"'”)]))"
    rf"|(?P<done>\bcompleted?\b|完成|完全)",
    re.IGNORECASE,
)
_NEAR_NOT = re.compile(
    r"(?:(?:\bnot|n't|\bnever)(?:\s+(?!only\b)[\w'-]+){0,3}\s*|\b(?:not|non|in|un)-"
    r"|[不未没沒][^不未没沒非]{0,3}|非(?!常)[^不未没沒非]?)$",
    re.IGNORECASE,
)
_TWICE_NOT = re.compile(r"[不未没沒非][^不未没沒非]{0,2}$")
_ANY_NOT = re.compile(
    r"\b(?:not|no|never|nor|neither|without|hardly|barely|lacks?|far from|nothing|none)\b|n't|[不未没沒无無]|非(?!常)",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\b(?:unsure|unclear|uncertain|whether|if|may|might|maybe|perhaps|possibly|probably|likely|seems?|appears?|could"
    r"|would|should|depends?|almost|nearly|mostly|cannot|can't|can not|unable|hard to|difficult to|not sure|either|only"
    r")\b"
    r"|无法|無法|不能|不确定|不確定|难以|難以|可能|也许|也許|是否|如果|假如|除非|不清楚|几乎|幾乎|基本|大致|大体|大體|接近|近乎"
    r"|差不多|似乎|看似|应该|應該|只有|既|\d\s*%|complete\W{0,3}(?:or\b|/|\|)|(?:/|\|)\W{0,2}(?:in)?complete"
    r"|(?:或者?|还是|還是)[不未]|[离離距]|\bas complete as\b|不一定|未必|不见得|不見得|\bnecessarily\b",
    re.IGNORECASE,
)
_FENCE = re.compile(r"\s*(?:`{3,}|~{3,})\w*\s*")
_LEADING = re.compile(r"[\s*_\"'(]*([01])\s*[)(,:–—-]")
_QUESTION = re.compile(r"[吗嗎呢]\s*$")
_SHORT = re.compile(
    r"[\s*_\"'“]*(?:(?P<yes>yes|true|pass(?:ed)?|是的?|对|對|通过|通過|合格|已?完成)"
    r"|(?P<no>no|false|fail(?:ed)?|否|不是|错|錯|[不未]通[过過]|不合格))[\s*_\"'”]*(?=$|[.,;:!。，；：！})\]–—]|-\s)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class _Anchor:
    """A verdict at its place in the reply; ``value`` is None where the place holds none. A higher rank overrules."""

    position: int
    value: Any
    rank: int = 0


def parse_verdict(text: Any) -> Verdict | None:
    """Verdict of a judge's reply: 1 (complete), 0 (incomplete), or None if it holds no readable verdict.

    Args:
        text: the reply's visible content; anything but a string gives None. Never raises on any text.
    """
    if not isinstance(text, str):
        return None
    visible = _visible(text)
    objects, rest = _objects(visible)
    anchors = [anchor for position, pairs in objects for anchor in _object_anchor(pairs, position)]
    anchors += _text_anchors(rest)
    if anchors:
        return _settle(anchors)
    lines = [line for line in rest.splitlines() if line.strip() and not _FENCE.fullmatch(line)]
    bare = {_bare(line) for line in (lines[:1] + lines[-1:])} - {None}
    if bare:
        return bare.pop() if len(bare) == 1 else None
    return _agreeing(_words(rest), _LEADING.match(rest))


def read_reply(content: Any, reasoning: Any = None) -> tuple[Verdict | None, str | None]:
    """Verdict of a reply and the judge's own words for it.

    Args:
        content: the visible reply; a server may send null.
        reasoning: ``reasoning_content``, which never gives a verdict.

    Returns:
        The verdict as :func:`parse_verdict` reads it from ``content`` alone. The reason of a JSON object, else the
        reply's text, else the end of the reasoning; one line of at most 500 characters, None without any.
    """
    return parse_verdict(content), _reason(content) or _reasoning_end(reasoning)


def parse_grade(text: Any, scale: str | Sequence[str]) -> str | None:
    """The grade that a judge's reply gives, for judges that grade in letters or words.

    Args:
        text: the reply's visible content.
        scale: the grades, as a sequence or as "A/B/C".

    Returns:
        The grade as ``scale`` writes it; None if the reply names none of them as its grade, or two.
    """
    grades = [item.strip() for item in (scale.split("/") if isinstance(scale, str) else scale) if item.strip()]
    if not isinstance(text, str) or not grades:
        return None
    known = {grade.upper(): grade for grade in grades}
    objects, rest = _objects(_visible(text))
    anchors = [
        _Anchor(position, known.get(str(value).strip().upper()), 1)
        for position, pairs in objects
        for value in _values(pairs, _GRADE_KEY)
    ]
    return _settle(anchors + _grade_anchors(rest, known))


def _visible(text: str) -> str:
    """The part after the reasoning; empty if the reasoning never ended. Outer quotes are dropped."""
    plain = unicodedata.normalize("NFKC", text)
    after = _THINK_CLOSE.split(plain)[-1]
    shown = _THINK_OPEN.split(after, maxsplit=1)[0][-_TAIL:].strip()
    return shown[1:-1] if len(shown) > 2 and shown[0] in '"“' and not re.search('["“”]', shown[1:-1]) else shown


def _settle(anchors: list[_Anchor]) -> Any:
    """The last anchor's value, unless one of its rank or above says something else."""
    last = max(anchors, key=lambda anchor: anchor.position, default=_Anchor(0, None))
    rivals = {anchor.value for anchor in anchors if anchor.rank >= last.rank and anchor.value is not None}
    return last.value if rivals <= {last.value} else None


def _objects(text: str) -> tuple[list[tuple[int, _Pairs]], str]:
    """JSON objects with their places, and the text with those objects blanked (their strings are no verdicts)."""
    found: list[tuple[int, _Pairs]] = []
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
        found.append((start, value))
        kept.append(text[position:start] + " " * (end - start))
        position = end
    return found, _FIELD.sub(_blank_field, "".join(kept) + text[position:])


def _blank_field(match: re.Match[str]) -> str:
    """In what is nearly JSON, too, only a verdict key's string is read."""
    key = match[1].strip()
    return match[0] if _JSON_KEY.fullmatch(key) or _GRADE_KEY.fullmatch(key) else " " * len(match[0])


def _object_anchor(pairs: _Pairs, position: int) -> list[_Anchor]:
    """All verdict keys must agree; "answer" or "result" count only without a "score" or the like, prose not at all."""
    values = list(_values(pairs, _STRONG_KEY)) or list(_values(pairs, _JSON_KEY))
    if not values:
        return []
    found = {_json_value(value) for value in [value for value in values if not _is_prose(value)] or values}
    return [_Anchor(position, found.pop() if len(found) == 1 else None, 1)]


def _is_prose(value: Any) -> bool:
    """{"conclusion": "Both cities were searched.", "score": 1}: words that say nothing about completeness."""
    return isinstance(value, str) and len(value) > 20 and not _NUMBER.match(value) and not _tells(value)


class _Pairs(list):  # type: ignore[type-arg]
    """A decoded JSON object, every pair kept, so that a key given twice is seen twice."""


def _values(pairs: _Pairs, keys: re.Pattern[str]) -> Iterator[Any]:
    for key, value in pairs:
        if isinstance(value, _Pairs):
            yield from _values(value, keys)
        elif keys.fullmatch(key.strip()):
            yield value


def _json_value(value: Any) -> Verdict | None:
    if isinstance(value, bool):
        return 1 if value else 0
    if isinstance(value, (int, float)):
        return {0.0: 0, 1.0: 1}.get(float(value))  # type: ignore[return-value]
    return _value(value) if isinstance(value, str) else None


_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_Pairs, parse_int=float)


def _text_anchors(text: str) -> list[_Anchor]:
    anchors = [
        _Anchor(match.start(), _value(match[1] or match[2] or match[3] or ""), _rank(text, match))
        for match in _BRACKETS.finditer(text)
    ]
    for match in _LABEL.finditer(text):
        rest = _first_line(text, match.end())
        if _is_adjective(match, text) or _BRACKETS.match(rest) or _is_mention(match, text) or _is_list(match, text):
            continue
        if _NUMBER.match(rest) or _tells(rest):
            value = None if _HEDGE.search(_clause_before(text, match.start())) else _value(rest)
            anchors.append(_Anchor(match.start(), value, _rank(text, match)))
    return anchors


def _first_line(text: str, start: int) -> str:
    return text[start : start + 200].split("\n", 1)[0]


def _line_before(text: str, start: int) -> str:
    return text[max(0, start - 200) : start].rpartition("\n")[2]


def _rank(text: str, match: re.Match[str]) -> int:
    """2 for a verdict that calls itself final or corrects an earlier one, else 0."""
    near = f"{_clause_before(text, match.start())} {match[0]}"
    return 2 if _FINAL.search(near) else 0


def _clause_before(text: str, start: int) -> str:
    return _CLAUSE.split(_line_before(text, start).rstrip(" ,:，：*"))[-1]


def _is_list(match: re.Match[str], text: str) -> bool:
    """ "Conclusion: 1. Arlen was searched. 2. ...": the number of a list."""
    if not _LIST.match(text, match.end()):
        return False
    return "\n" in match[0] or _NEXT_ITEM.search(text, match.end(), match.end() + 2000) is not None


def _is_mention(match: re.Match[str], text: str) -> bool:
    """'It says "score: 1", which I ignore': label and value stand in one pair of quotes."""
    opening = text[max(0, match.start() - 1) : match.start()]
    if not opening or opening not in _PAIRED:
        return False
    closing = _PAIRED[opening]
    return closing not in match[0] and closing in _first_line(text, match.end())[:40]


def _is_adjective(match: re.Match[str], text: str) -> bool:
    """Not a label: "The plan is not complete: 1 search is missing", or the legend "complete = 1, incomplete = 0"."""
    if (match[1] or "").lower() not in ("complete", "完整"):
        return False
    line = _line_before(text, match.start()).strip("\"'“”*`_#>- \t{,")
    return bool(line or re.search("[为為]", match[0]) or _LEGEND.search(text, match.start(), match.end() + 100))


def _value(text: str) -> Verdict | None:
    """Verdict at the start of ``text``: a number that is exactly 0 or 1, else the words of its first clause."""
    text = text.strip()
    number = _NUMBER.match(text)
    if not number:
        return _words(_CLAUSE.split(text, maxsplit=1)[0])
    if not _ONE_DIGIT.fullmatch(number[0]) or _BEYOND.match(text, number.end()) or not _ALONE.match(text, number.end()):
        return None
    verdict: Verdict = 1 if "1" in number[0] else 0
    said: set[Verdict | None] = set()
    for clause in _CLAUSE.split(_SENTENCE.split(text[number.end() :], maxsplit=1)[0])[::2]:
        said |= _clause_words(clause)
    return None if said == {1 - verdict} else verdict


def _agreeing(verdict: Verdict | None, number: re.Match[str] | None) -> Verdict | None:
    """None for "1 (incomplete)": a number in front that says the opposite of the words."""
    return None if number and verdict is not None and int(number[1]) != verdict else verdict


def _bare(line: str) -> Verdict | None:
    match = _BARE.fullmatch(line)
    if match is None or re.fullmatch(r"\s*[01]\.\s*", line):  # the number of a list
        return None
    return 1 if match[1] == "1" else 0


def _tells(text: str) -> bool:
    """Whether the first clause says something about completeness, be it only that it cannot be told."""
    first = _CLAUSE.split(text, maxsplit=1)[0]
    return bool(_WORD.search(first) or _SHORT.match(first) or _HEDGE.search(first))


def _words(text: str) -> Verdict | None:
    """The verdict that all verdict words agree on; None without one, with a hedge, or where they contradict."""
    found: set[Verdict | None] = set()
    asked = True
    pieces = [*_CLAUSE.split(text), ""]
    for clause, mark in zip(pieces[::2], pieces[1::2], strict=True):
        if mark.startswith(("?", "？")) or _QUESTION.search(clause):
            asked = True
            continue
        short = _SHORT.match(clause) if asked else None
        if short:
            found.add(1 if short["yes"] else 0)
        asked = asked and not clause.strip()
        found |= _clause_words(clause)
    return found.pop() if len(found) == 1 else None


def _clause_words(clause: str) -> set[Verdict | None]:
    said: set[Verdict | None] = set()
    hedged = _HEDGE.search(clause) is not None
    for match in _WORD.finditer(clause):
        said |= _word(match, clause, hedged)
    return said | ({1 if "1" in match[0] else 0 for match in _MAPPED.finditer(clause)} if said else set())


def _word(match: re.Match[str], clause: str, hedged: bool) -> set[Verdict | None]:
    """What one verdict word says in its clause; nothing for "completed" unless it is negated."""
    before = clause[max(0, match.start() - 100) : match.start()]
    near = _NEAR_NOT.search(before)
    if match["done"]:
        return {0} if near and not hedged else set()
    if hedged or (_ANY_NOT.search(before) and not (near and match["yes"])):
        return {None}
    if near and _TWICE_NOT.search(before[: near.start()]):
        return {None}
    return {0} if match["no"] or near else {1}


def _reason(content: Any) -> str | None:
    if not isinstance(content, str):
        return None
    shown = _visible(content)
    values = [value for _, pairs in _objects(shown)[0] for value in _values(pairs, _REASON_KEY)]
    given = [value for value in values if isinstance(value, str)]
    return " ".join((given or [shown])[-1][: 4 * _REASON_CHARS].split())[:_REASON_CHARS] or None


def _reasoning_end(reasoning: Any) -> str | None:
    if not isinstance(reasoning, str):
        return None
    line = " ".join(reasoning[-4 * _REASON_CHARS :].split())
    return line[-_REASON_CHARS:] or None


_GRADE_WORD = (
    r"(?:final[ _])?(?:grade|score|verdict|rating|answer|decision|judge?ment|conclusion|choice|option|label)"
    r"|[等评評][级級]|[选選][项項]|答案|[结結][论論]|判定|[评評]分|最[终終][评評]分"
)
_GRADE_KEY = re.compile(_GRADE_WORD, re.IGNORECASE)


def _grade_anchors(text: str, known: dict[str, str]) -> list[_Anchor]:
    grade = "|".join(re.escape(item) for item in sorted(known.values(), key=len, reverse=True))
    ends = r"(?![\w+'’-]|\s*(?:or\b|/|或))"
    verbs = r"is|as|gets|deserves|gives?|give it|assign|choose|select"
    forms = (
        rf"(?:\[\[|\\boxed\{{(?:\\text\{{)?|<(?i:{_GRADE_WORD})>)\s?(?P<a>{grade})\s?[\]}}<]",
        rf"(?<![a-zA-Z_])(?i:{_GRADE_WORD}){GAP}(?i:{EQUALS}|\bof\b)?{GAP}\(?(?P<b>{grade}){ends}",
        rf"(?:\b(?:{verbs})\s(?:an?\s)?|[选選给給][择擇出]?\s?)[*_`\"'(]{{0,4}}"
        rf"(?P<c>{grade}){ends}(?=[*_`\"')]{{0,4}}\s*(?:[.,;!。，；！]|$))",
        rf"^[\s*_`\"'(\[>#]{{0,9}}(?P<d>{grade}){ends}(?=[*_`\"')\]]{{0,4}}\s*(?:[.:。：)]|$))",
    )
    return [
        _Anchor(match.start(), known[match[match.lastgroup].upper()], _rank(text, match))  # type: ignore[index]
        for match in re.finditer("|".join(forms), text, re.MULTILINE)
    ]
