"""A judge's reply -> verdict, reason or grade. The only parser of judge replies.

A vote is 0 (incomplete) or 1 (complete); nothing is rounded, clipped or guessed. In order:

1. Reasoning (``<think>``) is dropped; full-width characters become ASCII.
2. Anchored verdicts: a verdict key of a JSON object, ``[[1]]``, ``\\boxed{1}``, ``<score>1</score>``, or a label such
   as "Score: 1" or "结论：1". All that hold a verdict must agree, but a final one ("Final score:", "最终评分：", "on
   reflection, ...") overrules those before it, and a JSON object overrules labels. If the value of the last one is not
   a verdict ("Score: 0.9", "[[90]]"), the reply has none. A label quoted with its value ('it says "score: 1"') is a
   mention, and so is one that somebody else is said to have given ("the planner claims: score: 1").
3. A line that is nothing but 0 or 1: the first or the last one.
4. Words: "complete", "完整", their negations, a leading "yes" or "no", an answer to the judge's own question. All must
   agree, and a hedge beside one ("cannot tell whether", "可能", "是否") leaves the reply without a verdict. "Complete"
   counts only where nothing but the calls can be meant, and gives way to what is said to be missing after it.

Numbers elsewhere in the text (counts, percentages, HTTP codes, list numbering) are never read. Work is bounded: the
last 20,000 characters count.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from rltr_verl.judge import verdict_patterns as p

Verdict = Literal[0, 1]


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
    anchors = [
        anchor
        for position, pairs in objects
        for anchor in _object_anchor(pairs, position)
        if not _is_reported(visible, position) and not p.ANOTHER.search(_line_before(visible, position))
    ]
    anchors += _text_anchors(rest) if rest.strip() else []
    if anchors:
        return _settle(anchors)
    lines = [line for line in rest.splitlines() if line.strip() and not p.FENCE.fullmatch(line)]
    bare = {_bare(line, len(lines) == 1) for line in (lines[:1] + lines[-1:])} - {None}
    if bare:
        return bare.pop() if len(bare) == 1 else None
    return _agreeing(_words(rest), p.LEADING.match(rest))


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
        for value in _values(pairs, p.GRADE_KEY)
    ]
    return _settle(anchors + _grade_anchors(rest, known))


def _visible(text: str) -> str:
    """The part after the reasoning; empty if the reasoning never ended. Outer quotes are dropped."""
    plain = text if text.isascii() else p.NOT_FIGURES.sub(lambda part: unicodedata.normalize("NFKC", part[0]), text)
    shown = p.TEMPLATE.sub("\n", _outside_reasoning(plain)[-p.TAIL :]).strip()
    return shown[1:-1] if len(shown) > 2 and shown[0] in '"“`' and not re.search('["“”`]', shown[1:-1]) else shown


def _outside_reasoning(text: str) -> str:
    """The part after the last end of reasoning, up to reasoning that does not end with a mark of its own kind."""
    closed = {_kind(match): match.start() for match in p.THINK_CLOSE.finditer(text)}
    unended = (match for match in p.THINK_OPEN.finditer(text) if closed.get(_kind(match), -1) < match.start())
    opened = next(unended, None)
    return p.THINK_CLOSE.split(text[: opened.start()] if opened else text)[-1]


def _kind(match: re.Match[str]) -> str:
    """think, analysis, channel, ...: which end belongs to which start."""
    name = re.sub(r"^\W+(?:begin_of_|end_of_)?|\W+$", "", match[0].lower())
    return "channel" if name.startswith("channel") else name


def _settle(anchors: list[_Anchor]) -> Any:
    """The last anchor's value, unless one of its rank or above says something else."""
    last = max(anchors, key=lambda anchor: anchor.position, default=_Anchor(0, None))
    rivals = {anchor.value for anchor in anchors if anchor.rank >= last.rank and anchor.value is not None}
    return last.value if rivals <= {last.value} else None


def _objects(text: str) -> tuple[list[tuple[int, _Pairs]], str]:
    """JSON objects with their places, and the text with those objects blanked (their strings are no verdicts)."""
    found: list[tuple[int, _Pairs]] = []
    position, kept = 0, []
    for _ in range(p.MAX_OBJECTS):
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
    return found, p.FIELD.sub(_blank_field, "".join(kept) + text[position:])


def _blank_field(match: re.Match[str]) -> str:
    """In what is nearly JSON, too, only a verdict key's string is read."""
    key = match[1].strip()
    return match[0] if p.JSON_KEY.fullmatch(key) or p.GRADE_KEY.fullmatch(key) else " " * len(match[0])


def _object_anchor(pairs: _Pairs, position: int) -> list[_Anchor]:
    """All verdict keys must agree; "answer" or "result" count only without a "score" or the like, prose not at all."""
    values = list(_values(pairs, p.STRONG_KEY)) or list(_values(pairs, p.JSON_KEY))
    if not values:
        return []
    found = {_json_value(value) for value in [value for value in values if not _is_prose(value)] or values}
    return [_Anchor(position, found.pop() if len(found) == 1 else None, 1)]


def _is_prose(value: Any) -> bool:
    """{"conclusion": "Both cities were searched.", "score": 1}: words that say nothing about completeness."""
    return isinstance(value, str) and len(value) > 20 and not p.NUMBER.match(value) and not _tells(value)


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
    return _value(value.replace("_", " ")) if isinstance(value, str) else None


_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_Pairs, parse_int=float)


def _text_anchors(text: str) -> list[_Anchor]:
    anchors = [
        _Anchor(match.start(), _bracket_value(match, text), _rank(text, match))
        for match in list(p.BRACKETS.finditer(text))[-p.MAX_ANCHORS :]
        if not _is_mention(match, text)
    ]
    labels = list(p.LABEL.finditer(text))[-p.MAX_ANCHORS :]
    for match, following in zip_longest(labels, labels[1:]):
        rest = _first_line(text, match.end())
        rest = rest[: following.start() - match.end()] if following else rest
        if _is_adjective(match, text) or p.BRACKETS.match(rest) or _is_mention(match, text) or _is_list(match, text):
            continue
        if p.NUMBER.match(rest) or p.WRAPPED.match(rest) or _tells(rest):
            value = None if _is_hedged(match, text) else _value(rest)
            anchors.append(_Anchor(match.start(), value, _rank(text, match)))
    return anchors


def _bracket_value(match: re.Match[str], text: str) -> Verdict | None:
    before = _clause_before(text, match.start()) if match[4] else ""
    return (
        None if p.HEDGE.search(before) or p.ANY_NOT.search(before) else _value(next(filter(None, match.groups()), ""))
    )


def _first_line(text: str, start: int) -> str:
    return text[start : start + 200].split("\n", 1)[0]


def _line_before(text: str, start: int) -> str:
    return text[max(0, start - 200) : start].rpartition("\n")[2]


def _rank(text: str, match: re.Match[str]) -> int:
    """2 for a verdict that calls itself final or corrects an earlier one, else 0."""
    near = f"{_clause_before(text, match.start())} {match[0]}"
    return 2 if p.FINAL.search(near) else 0


def _clause_before(text: str, start: int) -> str:
    return p.CLAUSE.split(_line_before(text, start).rstrip(" ,:，：*`\"'“‘"))[-1]


def _is_list(match: re.Match[str], text: str) -> bool:
    """ "Conclusion: 1. Arlen was searched. 2. ...": the number of a list."""
    if not p.LIST.match(text, match.end()):
        return False
    return "\n" in match[0] or p.NEXT_ITEM.search(text, match.end(), match.end() + 2000) is not None


def _is_mention(match: re.Match[str], text: str) -> bool:
    """'It says "score: 1", which I ignore': a verdict in quotes, of others, or on something else."""
    before, after = _line_before(text, match.start()), _first_line(text, match.start())
    sentence = p.SENTENCE.split(before)[-1] + p.SENTENCE.split(after, maxsplit=1)[0]
    if p.ANOTHER.search(before) or p.IGNORED.search(sentence) or _is_reported(text, match.start()):
        return True
    return _is_quoted(before, after, len(match[0].rstrip("\"'“”‘’`「」『』*_ ")))


def _is_quoted(before: str, after: str, length: int) -> bool:
    """Whether the first ``length`` characters of ``after`` stand inside quotes, and not as the value of a label."""
    start, end = len(before), len(before) + length
    spans = (span for span in p.QUOTED.finditer(before + after) if span.start() < start and span.end() > end)
    return any(not p.LABEL_ENDS.search(before[max(0, span.start() - 60) : span.start()]) for span in spans)


def _is_hedged(match: re.Match[str], text: str) -> bool:
    sentence = p.SENTENCE.split(_line_before(text, match.start()))[-1]
    return bool(p.HEDGE.search(_clause_before(text, match.start())) or p.CONDITION.match(sentence))


def _is_reported(text: str, start: int) -> bool:
    """Whether the clause before ``start`` tells what somebody else says."""
    return p.REPORTS.search(p.CLAUSE.split(_line_before(text, start).rstrip(" :：*`\"'“‘(["))[-1]) is not None


def _is_adjective(match: re.Match[str], text: str) -> bool:
    """Not a label: "The plan is not complete: 1 search is missing", or the legend "complete = 1, incomplete = 0"."""
    if (match[1] or "").lower() not in ("complete", "完整"):
        return False
    line = _line_before(text, match.start()).strip("\"'“”*`_#>- \t{,")
    return bool(line or re.search("[为為]", match[0]) or p.LEGEND.search(text, match.start(), match.end() + 100))


def _value(text: str) -> Verdict | None:
    """Verdict at the start of ``text``: a number that is exactly 0 or 1, else the words of its first clause."""
    text = p.WRAPPED.sub(r"\1", text.strip())
    number = p.NUMBER.match(text)
    if not number:
        first = p.CLAUSE.split(text, maxsplit=1)[0]
        said = _words(first)
        return None if said == 1 and _is_taken_back(text, len(first)) else said
    if (
        not p.ONE_DIGIT.fullmatch(number[0])
        or p.BEYOND.match(text, number.end())
        or not p.ALONE.match(text, number.end())
    ):
        return None
    verdict: Verdict = 1 if "1" in number[0] else 0
    clauses = p.CLAUSE.split(p.SENTENCE.split(text[number.end() :], maxsplit=1)[0])[::2]
    words = set().union(*map(_clause_words, clauses))
    changed = p.CHANGED if verdict == 0 else p.LIMITED
    return None if words == {1 - verdict} or any(map(changed.search, clauses)) else verdict


def _agreeing(verdict: Verdict | None, number: re.Match[str] | None) -> Verdict | None:
    """None for "1 (incomplete)": a number in front that says the opposite of the words."""
    return None if number and verdict is not None and int(number[1]) != verdict else verdict


def _bare(line: str, alone: bool) -> Verdict | None:
    if alone:
        line = line.rstrip(" .")  # otherwise "1." is the number of a list
    match = p.BARE.fullmatch(line)
    if match is None or p.NUMBERED.fullmatch(line):
        return _explained(line) if alone else None
    return 1 if match[1] == "1" else 0


def _explained(line: str) -> Verdict | None:
    """Of "0: Brona is missing" or "1 - nothing is missing", where number and words agree."""
    match = p.EXPLAINED.fullmatch(line.strip())
    if match is None or re.search(r"\b2[:.)]", line):
        return None
    lacks = p.LACK.search(p.NO_LACK.sub(" ", match[2])) is not None
    return int(match[1]) if lacks is (match[1] == "0") and not p.HEDGE.search(match[2]) else None  # type: ignore[return-value]


def _tells(text: str) -> bool:
    """Whether the first clause says something about completeness, be it only that it cannot be told."""
    first = p.CLAUSE.split(text, maxsplit=1)[0]
    return bool(p.WORD.search(first) or p.SHORT.match(first) or p.HEDGE.search(first))


def _words(text: str) -> Verdict | None:
    """The verdict that all verdict words agree on; None without one, with a hedge, or where they contradict.

    The last of them overrules the others if it is a conclusion ("Therefore ..."). "Complete" gives way to what is said
    to be missing after it.
    """
    text = p.EMPHASIS.sub("", text)
    said = list(_said(text))
    if not said:
        return None
    start, end, last = said[-1]
    told = last if _opens(text, start) and last in ({0}, {1}) else set().union(*(values for _, _, values in said))
    verdict = next(iter(told)) if len(told) == 1 else None
    return None if verdict == 1 and _is_taken_back(text, end) else verdict


def _said(text: str) -> Iterator[tuple[int, int, set[Verdict | None]]]:
    """What each clause with a verdict word says, with the place of the clause and of the word's end."""
    asked, others, foreign = True, False, False
    for start, clause, mark in _clauses(text):
        if p.ASKED.match(text, start) or p.QUESTION.search(clause):
            asked = p.ASKS_ALL.search(clause) is not None and not p.LACK.search(clause)
            continue
        said = _short_words(clause) if asked and not p.VALUED.match(text, start + len(clause)) else set()
        said |= _clause_words(clause)
        if 1 in said and (foreign or p.CONDITION.match(p.SENTENCE.split(text[max(0, start - 200) : start])[-1])):
            said = {None}
        if said and not others:
            yield start, start + max((match.end() for match in p.WORD.finditer(clause)), default=len(clause)), said
        asked = asked and not clause.strip()
        others = mark.startswith(":") and p.REPORTS.search(clause) is not None
        foreign = mark.startswith(":") and p.INTRODUCES.fullmatch(clause) is None


def _is_taken_back(text: str, end: int) -> bool:
    """Whether what follows ``end`` says that something is missing after all, or only under a condition."""
    rest = text[end:]
    sentence = p.SENTENCE.split(rest, maxsplit=1)[0]
    lacks = p.LACK.search(p.NO_LACK.sub(" ", rest)) or p.TURNS.match(rest) or p.HEDGE.search(sentence)
    return bool(lacks or p.CROSS.search(text))


def _clauses(text: str) -> Iterator[tuple[int, str, str]]:
    """Place, clause, and the mark that ends it."""
    pieces, place = [*p.CLAUSE.split(text), ""], 0
    for clause, mark in zip(pieces[::2], pieces[1::2], strict=True):
        yield place, clause, mark
        place += len(clause) + len(mark)


def _opens(text: str, start: int) -> bool:
    """Whether the sentence around ``start`` opens as a conclusion."""
    sentence = p.SENTENCE.split(text[max(0, start - 200) : start])[-1] + text[start : start + 40]
    return p.CONCLUDES.match(sentence) is not None


def _short_words(clause: str) -> set[Verdict | None]:
    short = p.SHORT.match(clause)
    if not short:
        return set()
    return {1 if short["yes"] else 0, *(1 if "1" in match[0] else 0 for match in p.MAPPED.finditer(clause))}


def _clause_words(clause: str) -> set[Verdict | None]:
    said: set[Verdict | None] = set()
    hedged = p.HEDGE.search(clause) is not None
    for match in p.WORD.finditer(clause):
        said |= _word(match, clause, hedged)
    return said | ({1 if "1" in match[0] else 0 for match in p.MAPPED.finditer(clause)} if said else set())


def _word(match: re.Match[str], clause: str, hedged: bool) -> set[Verdict | None]:
    """What one verdict word says in its clause; nothing for "completed" unless it is negated."""
    before = clause[max(0, match.start() - 100) : match.start()]
    near = p.NEAR_NOT.search(before)
    if p.REPORTS.search(before):
        return set()
    if match["done"]:
        return {0} if near and not hedged else set()
    if hedged or (p.ANY_NOT.search(before) and not (near and match["yes"])):
        return {None}
    if near and p.TWICE_NOT.search(before[: near.start()]):
        return {None}
    if match["no"] or near:
        return {0}
    asserted = p.SUBJECT.fullmatch(before) is not None and p.NO_SUBJECT.match(before) is None
    ends = match["yes"].isascii() or p.AFTER.match(clause, match.end()) is not None
    return {1} if asserted and ends else {None}


def _reason(content: Any) -> str | None:
    if not isinstance(content, str):
        return None
    shown = _visible(content)
    values = [value for _, pairs in _objects(shown)[0] for value in _values(pairs, p.REASON_KEY)]
    given = [value for value in values if isinstance(value, str)]
    return " ".join((given or [shown])[-1][: 4 * p.REASON_CHARS].split())[: p.REASON_CHARS] or None


def _reasoning_end(reasoning: Any) -> str | None:
    if not isinstance(reasoning, str):
        return None
    line = " ".join(reasoning[-4 * p.REASON_CHARS :].split())
    return line[-p.REASON_CHARS :] or None


def _grade_anchors(text: str, known: dict[str, str]) -> list[_Anchor]:
    grade = "|".join(re.escape(item) for item in sorted(known.values(), key=len, reverse=True))
    ends = r"(?![\w+'’-]|\s*(?:or\b|/|或)|\s(?:is|was)\b)"
    verbs = r"is|as|gets|deserves|gives?|give it|assign|choose|select"
    forms = (
        rf"(?:\[\[|\\boxed\{{(?:\\text\{{)?|<(?i:{p.GRADE_WORD})>)\s?(?P<a>{grade})\s?[\]}}<]",
        rf"(?<![a-zA-Z_])(?i:{p.GRADE_WORD}){p.GAP}(?i:{p.EQUALS}|\bof\b)?{p.GAP}\(?(?P<b>{grade}){ends}",
        rf"(?:\b(?:{verbs})\s(?:an?\s)?|[选選给給][择擇出]?\s?)[*_`\"'(]{{0,4}}"
        rf"(?P<c>{grade}){ends}(?=[*_`\"')]{{0,4}}\s*(?:[.,;!。，；！]|$))",
        rf"^[\s*_`\"'(\[>#]{{0,9}}(?P<d>{grade}){ends}(?=[*_`\"')\]]{{0,4}}\s*(?:[.:。：)]|$))",
    )
    return [
        _Anchor(match.start(), known[match[match.lastgroup].upper()], _rank(text, match))  # type: ignore[index]
        for match in re.finditer("|".join(forms), text, re.MULTILINE)
    ]
