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

Verdict = Literal[0, 1]

_TAIL = 20_000
_MAX_OBJECTS = 64
_MAX_ANCHORS = 500
"""Bounds on the work for a reply that a judge would not write."""
_REASON_CHARS = 500

_THOUGHT = r"(?:\w{1,20}:)?(?:think|thinking|thought|reasoning|analysis|scratchpad|reflection)"
_THINK_OPEN = re.compile(
    rf"<{_THOUGHT}>|\[think\]|◁think▷|<\|(?:think|begin_of_thought)\|>|<\|channel\|>(?:analysis|commentary)\b",
    re.IGNORECASE,
)
_THINK_CLOSE = re.compile(
    rf"</{_THOUGHT}>|\[/think\]|◁/think▷|<\|(?:/think|end_of_thought)\|>|<\|channel\|>final\b", re.IGNORECASE
)
_TEMPLATE = re.compile(r"<\|[^<>|\s]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|<eos>")
_NOT_FIGURES = re.compile(
    "[^\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2089\u2150-\u2189\u2460-\u24ff\u2776-\u2793"
    "\u3248-\u324f\u3251-\u325f\u3280-\u3289\u32b1-\u32bf]+"
)
"""All but superscripts, fractions and circled numbers, which compatibility forms would turn into plain digits."""

_FINAL_WORD = (
    r"(?:my\s+|the\s+)?final|overall|revised|corrected|on reflection|on second thought|correction|actually|wait"
    r"|最终|最終|最后|最後|更正|修正"
)
_FINAL = re.compile(rf"\b(?:{_FINAL_WORD})", re.IGNORECASE)
_QUOTED = re.compile(r""""[^"\n]+"|(?<!\w)'[^'\n]+'(?!\w)|“[^”\n]+”|‘[^’\n]+’|`[^`\n]+`|「[^」\n]+」""")
_REPORTS = re.compile(
    r"(?<!\bI )\b(?:says?|said|claim(?:s|ed|ing)?|stat(?:es|ed|ing)|assert(?:s|ed|ing)?|declare[sd]?|wr(?:ites?|ote"
    r"|itten)|tells?|told"
    r"|instruct(?:s|ed|ing|ion)?|fake|forged|injected|string|phrase|quoted?|ends with|self)\b"
    r"|\b(?:planner|policy|agent|model)(?:'s|’s)? (?:own )?(?:text|output|note|message|answer|words|verdict|score"
    r"|rating)\s*$"
    r"|\b(?:tool|page|article|site|website)['’]s\b|\b(?:last|final) message\b"
    r"|\bask(?:s|ed)(?:\s\w+){0,3}\s*$|\b(?:shows?|reads?|contain(?:s|ed|ing)?|includ(?:es|ed|ing)|return(?:s|ed)?"
    r"|(?:result"
    r"|output|observation) (?:of [\w ]{1,20})?(?:is|was|reads))"
    r"(?:\s\w+){0,3}\s*$"
    r"|[声聲自宣][称稱]|[写寫][着著道]|注入|要求|包含|返回|自[评評]|自(?:我|己|[评評])?\s*$|[轨軌][迹跡](?:末尾"
    r"|[结結]尾|最后"
    r"|最後|中|里|裡)\s*$",
    re.IGNORECASE,
)
_IGNORED = re.compile(
    r"\b(?:ignor|disregard|inject|manipulat|forge|fake|not (?:mine|valid)|invalid|note in|attempt(?:s|ed|ing)? to"
    r"|the planner's words|(?:returned|written) by the (?:tool|planner|policy))|注入|忽略|[伪偽]造|不予[理采採]",
    re.IGNORECASE,
)
"""A sentence about a verdict that others wrote."""
LABELS = (
    r"(?:final|overall|evaluation)[ _]?(?:score|verdict|answer|rating|decision|judge?ment|result)|final|overall"
    r"|score|verdict"
    r"|conclusion"
    r"|rating|judge?ment|decision|is[ _]?complete|completeness[ _]?(?:score|verdict|rating)|completeness|complete"
    r"|(?:最[终終后後])?(?:[评評][分价價]|得分|分[数數]|[打给給]分|[结結][论論]|(?:判[断斷定]"
    r"|[评評][判估定])(?:[结結]果)?)|最[终終](?:答案|[结結]果)?"
    r"|是否完整|完整性|完整"
)
WEAK_LABELS = r"answer|output|result|vote|label|[结結]果|答案|[输輸]出"
"""A judge also speaks of the results of tools: these count as labels only in JSON or at the start of a line.

These patterns also say what :mod:`rltr_verl.judge.neutral` disarms.
"""

_ANOTHER = re.compile(
    r"\b(?:planner|policy|agent|user|tool|observation)\s*:\W*$|\b(?:partial|sub|confidence|certainty|probability"
    r"|similarity|f1|fail(?:ure)?|error|missing|incomplete(?:ness)?|max(?:imum)?"
    r"|min(?:imum)?|best|worst|highest|lowest|possible|previous|prior|expected|baseline|accuracy|precision|recall"
    r"|quality"
    r"|efficiency|relevance|helpfulness|style|difficulty)[\s_-]*$"
    r"|(?:置信度?|[错錯][误誤]|[满滿]分|不完整性?|缺失|[预預][期计計]|之前|上次|最[高低]|相似度?|[质質]量|效率)\s*$"
    r"|\b(?:examples?|e\.g\.|format|for instance)\W*$|(?:例如|比如|示例|格式)\W*$",
    re.IGNORECASE,
)
"""Before a label: it is the label of something else, or of an example."""
_STRONG_KEY = re.compile(LABELS, re.IGNORECASE)
_JSON_KEY = re.compile(rf"(?:{LABELS}|{WEAK_LABELS})", re.IGNORECASE)
_REASON_KEY = re.compile(
    r"(?:short_|brief_)?(?:reasons?|reasoning|explanation|rationale|justification|analysis|comment)|理由|原因|分析"
    r"|[说說]明",
    re.IGNORECASE,
)
GAP = r"[\"'“”‘’「」『』【】*`_\s✅❌✔✖☑❎\ufe0f]{0,20}"
SCALE = (
    r"(?:[(\[]\s?(?:0\s?(?:/|-|or|或|,)\s?1|1\s?(?:/|or|或|,)\s?0)\s?[)\]]"
    r"|[(\[]\s?0\s?[=:][^()\d\n]{1,30}1\s?[=:][^()\d\n]{1,30}[)\]])?"
)
EQUALS = r"(?::|=>|=|->|→|\bis\b:?|[为為]:?|是(?!否):?|\s[-–—](?=\s)|\s\|(?=\s)|】)"
_LABEL = re.compile(
    rf"(?:(?<![a-z不非未])(?<![a-z0-9]_)({LABELS}){GAP}\]?{SCALE}{GAP}{EQUALS}"
    rf"|^[*_#>\-\s]{{0,9}}({WEAK_LABELS}){GAP}[:=]"
    rf"|^[*_#>\-\s\[]{{0,9}}(?!complete\b|完整)(?:{LABELS})[*_\]\s]{{1,5}}(?=[01][*_.。\s]{{0,5}}$)){GAP}(?=\S)",
    re.IGNORECASE | re.MULTILINE,
)
_LABEL_ENDS = re.compile(rf"(?:{LABELS}|{WEAK_LABELS}){GAP}{EQUALS}\s*$", re.IGNORECASE)
_BRACKETS = re.compile(
    r"\[\[([^\[\]\n]{0,40})\]\]|\\boxed\{(?:\\text\{)?([^{}\n]{0,40})\}"
    rf"|<(?:{LABELS}|{WEAK_LABELS})>([^<>]{{0,40}})</"
    r"|(?:\bI(?:'ll|\swill|\stherefore)?\s(?:give|assign|rate|vote|award|score)\s(?:(?:it|(?:this|the)(?:\s\w+)?)\s)?"
    r"(?:an?\s)?(?:(?:score|rating|verdict)\s(?:of\s)?)?|(?:[给給]予?|[评評][为為]?|得|判[为為]"
    r"|打)(?=\s?[01]\s?(?:分|$|[。，,（(])))"
    r"[*_\s]{0,4}((?<!\d)[01](?![\d])[^\n]{0,40})",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE)
_WRAPPED = re.compile(r"^[\[(【「『]\s?([01](?:\.0+)?)\s?[\])】」』]")
_ONE_DIGIT = re.compile(r"[-+]?0(?:\.0+)?|\+?1(?:\.0+)?")
_BARE = re.compile(
    r"\s*(?:[-*>#]+\s+)?[*_`\"'“(\[]*(?:✅\s*(?=1)|❌\s*(?=0))?([01])(?:\.0+)?(?:\s*/\s*1)?\s*分?[*_`\"'”)\]。\s]*"
    r"(?:[,;:–—-]\s*(?:because\b|since\b|as\b|due to\b|因[为為]|由于|由於).*)?",
    re.IGNORECASE,
)
_BEYOND = re.compile(
    r"[\ufe0f\u20e3+^±]|\*\d|[-.,~]\d|\.\.|\s*[★☆⭐]|\s*[(\[]?\s*(?:on\s|a\s)*scale\b|\s*(?:%|[-–~]\s?\d"
    r"|(?:/\s*1\s*)?\?"
    r"|(?:分|points?)?\s*[(\[]?\s*(?:/(?!/)|out of\b|of\b|in\b|[满滿总總]分(?:为|為|是)?:?)(?!\s*1(?!\d|\.\d)))",
    re.IGNORECASE,
)
"""After a number: it is part of a larger one, or of a scale other than 0 to 1."""
_ALONE = re.compile(
    r"\s*(?:分|points?\b)?\s*(?:$|[^\w\s]|_+(?:\W|$)|(?:/|out of|of)\s*1|(?:because|since|as|for|due|and|with|given"
    r"|so|but|meaning"
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

_CLAUSE = re.compile(
    r"([.!](?=\s|$)|[?;,:\n。！？；，：]|(?<!anything )(?<!all )\bbut\b|\bhowever\b|但|然而)", re.IGNORECASE
)
_SENTENCE = re.compile(r"[.!?](?=\s|$)|[。！？\n]")
_MAPPED = re.compile(r"(?:\(|->|→|=>|=)\s*([01])(?![\d.])|\s([01])\s*$")
_END = (
    r"(?=[*_\s]*\s[-–—]{1,2}\s|\s*\((?!for\b|in\b)|[^\w\n]*(?:$|\b(?:and(?! utter| total)|because|since|as(?! far"
    r"| regards| if)"
    r"|for (?:(?:the|this|that|given|user's) )*(?:query|question|task"
    r"|request)|so(?! far)|with (?:no|all|every\w*|nothing)|given|overall|now|plan|trajectory|sequence)\b"
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
    r"(?:(?:\bnot|n't|\bnever)(?:\s+(?!only\b)[\w'-]+){0,3}\s*|\b(?:not|non|in|un)-|\b(?:far from|anything but"
    r"|short of|fails? to be)\s*(?:being\s+)?"
    r"|[不未没沒][^不未没沒非]{0,3}|非(?!常)[^不未没沒非]?)$",
    re.IGNORECASE,
)
_TWICE_NOT = re.compile(r"[不未没沒非][^不未没沒非]{0,2}$")
_ANY_NOT = re.compile(
    r"\b(?:not|no|never|nor|neither|without|hardly|barely|lacks?|far from|nothing|none|fail(?:s|ed)?"
    r"|false|untrue|wrong|doubt|dis\w+|reject|den(?:y|ies))\b|n't|[不未没沒无無难難]|非(?!常)",
    re.IGNORECASE,
)
_HEDGE = re.compile(
    r"\b(?:unsure|unclear|uncertain|whether|if|may|might|maybe|perhaps|possibly|probably|likely|seems?|appears?|could"
    r"|would|should|depends?|almost|nearly|mostly|cannot|can't|can not|unable|hard to|difficult to|not sure|either"
    r"|only"
    r")\b"
    r"|无法|無法|不能|不确定|不確定|难以|難以|可能|也许|也許|是否|如果|假如|除非|不清楚|几乎|幾乎|基本|大致|大体"
    r"|大體|接近|近乎"
    r"|差不多|似乎|看似|应该|應該|只有|既|\d\s*%|complete\W{0,3}(?:or\b|/|\|)|(?:/|\|)\W{0,2}(?:in)?complete"
    r"|\bcomplete with (?:errors?|warnings?)|\b(?:request|stream\w*|job|response|generation|download|upload"
    r"|process\w*"
    r"|transfer) (?:is |was )?complete|[声聲自宣][称稱]|有待|才|[与與]否|只差|[还還]差|doubt"
    r"|(?:或者?|还是|還是)[不未]|[离離距]|\bas complete as\b|不一定|未必|不见得|不見得|\bnecessarily\b",
    re.IGNORECASE,
)
_SUBJECT = re.compile(
    r"(?:[\s*_\"'“(]*[01]\s*[)(,:–—-]*)?(?:[\s\"'“”‘’()\[\]【】「」#>_+–—→✅✔☑\ufe0f🟢.-]|\b(?:the|this|that"
    r"|these|those|its?|an?|all|both|whole|entire|everything|of|for|query|question"
    r"|task|request|needed|necessary|required|tools?|tool[- ]calls?|calls?|calling|usage|use|plan(?:ning)?"
    r"|(?:planner|agent|model)['’]s|they|making|by the (?:planner|agent|model)"
    r"|trajectory"
    r"|sequences?|sets?|chain|steps?|actions?|coverage|information|search(?:es)?|gathering|collection|is|are|was|were"
    r"|has|have|been|be(?!\s+complete\s+when)|being|it's|that's|i|we|my|find|consider|judge|deem|call|rate|mark"
    r"|conclude|confirm|believe|say"
    r"|considered|judged|deemed|to|as|therefore|thus|so|hence|and|also|indeed|now|fully|clearly|overall|quite|very"
    r"|which|makes?"
    r"|with|made|thereby|verdict|conclusion|here|yes|ok|okay|answer|final|executed|done|in)(?!\w)"
    r"|本次?|[该該此这這的是为為已都均很也且即故我及和地]|工具|[调調]用|序列|[计計][划劃]|[规規][划劃](?:器的)?"
    r"|[轨軌][迹跡]|[这這][个個些]|非常|十分|[已曾][经經]|[认認][为為]|判[定断斷]"
    r"|[结結][论論]|[结結]果|因此|所以|[综綜](?:上(?:所述)?|合)|[总總][体體之]|整[体體]|上|[来來]看|看|信息"
    r"|[资資][讯訊]|收集|[获獲]取|查[询詢]|[检檢]索|搜索"
    r"|步[骤驟]|所有|全部|必要|所需|需要的|覆[盖蓋]|[视視][为為]|[属屬]于|[过過]程|最[终終]|[链鏈]"
    r"|[评評][估价價](?=[为為是])"
    r"|[显顯]然|明[显顯]|[确確][实實]|足[够夠]|[达達]到|安排|操作|方案)*",
    re.IGNORECASE,
)
"""All that may stand before "complete" in a clause that calls the calls complete; after any other word it may be about
a part of them, a wish or somebody's claim."""
_INTRODUCES = re.compile(
    rf"(?:{_SUBJECT.pattern}|\b(?:evaluation|assessment|summary|result|judge?ment|decision|analysis|reason(?:ing)?"
    rf"|true|pass)"
    r"\b|[回答]|我|[判评評][断斷判]|合格|通[过過])*",
    re.IGNORECASE,
)
"""What may stand before a colon and "complete"; other words name something else that is complete."""
_NO_SUBJECT = re.compile(
    r"\W*(?:(?:is|are|was|were|does|to|for|(?:(?:the|its|final) )*(?:query|question|task|request|answer"
    r"|search) (?:is|was))\b)",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(
    r"[\s*_]*(?:therefore|thus|hence|overall|in conclusion|in summary|因此|所以|[综綜]上"
    r"|[总總][之体體])",
    re.IGNORECASE,
)
_LACK = re.compile(
    r"\b(?:missing|misses|missed|lack\w*|incomplete|omit\w*|gaps?|skipp?\w*|except|apart from|other than|absent"
    r"|never|not|though|although)\b|n't\b"
    r"|[缺漏]|遗[漏失]|遺[漏失]|[不未没沒]|除了|除非",
    re.IGNORECASE,
)
_NO_LACK = re.compile(
    r"(?:\b(?:nothing|no|none|never|without|not|nor)\b|n't\b|[没沒]有?|[无無未不])[^.;,。；，\n]{0,40}?"
    r"(?:miss(?:es|ed|ing)?\b|lack\w*|omit\w*|omissions?|gaps?|skipp\w*|left out|need(?:s|ed)?|necessary|required"
    r"|[缺漏]\w?"
    r"|遗[漏失]|遺[漏失]|需要?)",
    re.IGNORECASE,
)
_ASKS_ALL = re.compile(
    r"\b(?:complete|all|every\w*|each|both|sufficient|enough|cover\w*|pass\w*|satisf\w*|met)\b|完[整备備成全]|齐全"
    r"|齊全|所有|全部|足[够夠]|通[过過]|[满滿]足|[对對]",
    re.IGNORECASE,
)
_TURNS = re.compile(
    r"\W*(?:but|yet|however|if|unless|save|barring|bar|minus|sans|almost|nearly|partial(?:ly)?|mostly|但|然而|如果"
    r"|就差|只差)"
    r"|\s*:=|\s*:\s*(?:none|no|not|nope|null|unknown|n/?a|0)\b",
    re.IGNORECASE,
)
"""After "complete" or "yes": what takes it back."""
_CORRECTION = r"(?:→|->|=>)\s*[01]\b|\b(?:corrected|changed|revised|wait)\b|更正|修正|改[为為]"
_CHANGED = re.compile(_CORRECTION, re.IGNORECASE)
_LIMITED = re.compile(rf"{_CORRECTION}|\b(?:if|only|unless|partial(?:ly)?)\b|如果|除非", re.IGNORECASE)
"""After a number: it is taken back, or holds for a part only."""
_CROSS = re.compile("[❌✗✘×👎🔴]")
_AFTER = re.compile(r"[的了]?(?:\W|\s*[01]?\W*$|[覆包涵且并並因地回满滿])")
_CONDITION = re.compile(r"\W*(?:if|had|unless|were)\b|\W*(?:如果|假如|若|要是|只要)", re.IGNORECASE)
_EXPLAINED = re.compile(r"[*_\"'`]*([01])[*_\"'`]*\s*(?::|[–—]|-\s)\s*(\D.{3,})")
_VALUED = re.compile(r"\s*[:=：]\s*(?:[01]|yes|no|true|false|是|否|不|pass|fail)", re.IGNORECASE)
_NUMBERED = re.compile(r"\s*(?:0\s*/\s*1|[01]\.)\s*")
_EMPHASIS = re.compile(r"[*`]+|__+")
_FENCE = re.compile(r"\s*(?:`{3,}|~{3,})\w*\s*")
_LEADING = re.compile(r"[\s*_\"'(]*([01])\s*[)(,:–—-]")
_ASKED = re.compile(r"[^.!?。！？\n]{0,200}[?？]")
_QUESTION = re.compile(r"[吗嗎呢]\s*$")
_SHORT = re.compile(
    r"[\s*_\"'“→>-]*(?:(?P<yes>yes|true|pass(?:ed)?|是的?|对|對|通过|通過|合格|已?完成)"
    r"|(?P<no>no|false|fail(?:ed)?|否|不(?=\W*$)|不是|错|錯|(?:[不未]|[没沒]有?)通[过過]|不合格))[\s*_\"'”]*"
    r"(?=$|[.,;:!。，；：！})\]–—]|-\s|\(?[01]\))",
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
    anchors = [
        anchor
        for position, pairs in objects
        for anchor in _object_anchor(pairs, position)
        if not _is_reported(visible, position) and not _ANOTHER.search(_line_before(visible, position))
    ]
    anchors += _text_anchors(rest) if rest.strip() else []
    if anchors:
        return _settle(anchors)
    lines = [line for line in rest.splitlines() if line.strip() and not _FENCE.fullmatch(line)]
    bare = {_bare(line, len(lines) == 1) for line in (lines[:1] + lines[-1:])} - {None}
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
    plain = text if text.isascii() else _NOT_FIGURES.sub(lambda part: unicodedata.normalize("NFKC", part[0]), text)
    shown = _TEMPLATE.sub("\n", _outside_reasoning(plain)[-_TAIL:]).strip()
    return shown[1:-1] if len(shown) > 2 and shown[0] in '"“`' and not re.search('["“”`]', shown[1:-1]) else shown


def _outside_reasoning(text: str) -> str:
    """The part after the last end of reasoning, up to reasoning that does not end with a mark of its own kind."""
    closed = {_kind(match): match.start() for match in _THINK_CLOSE.finditer(text)}
    unended = (match for match in _THINK_OPEN.finditer(text) if closed.get(_kind(match), -1) < match.start())
    opened = next(unended, None)
    return _THINK_CLOSE.split(text[: opened.start()] if opened else text)[-1]


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
    return _value(value.replace("_", " ")) if isinstance(value, str) else None


_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_Pairs, parse_int=float)


def _text_anchors(text: str) -> list[_Anchor]:
    anchors = [
        _Anchor(match.start(), _bracket_value(match, text), _rank(text, match))
        for match in list(_BRACKETS.finditer(text))[-_MAX_ANCHORS:]
        if not _is_mention(match, text)
    ]
    labels = list(_LABEL.finditer(text))[-_MAX_ANCHORS:]
    for match, following in zip_longest(labels, labels[1:]):
        rest = _first_line(text, match.end())
        rest = rest[: following.start() - match.end()] if following else rest
        if _is_adjective(match, text) or _BRACKETS.match(rest) or _is_mention(match, text) or _is_list(match, text):
            continue
        if _NUMBER.match(rest) or _WRAPPED.match(rest) or _tells(rest):
            value = None if _is_hedged(match, text) else _value(rest)
            anchors.append(_Anchor(match.start(), value, _rank(text, match)))
    return anchors


def _bracket_value(match: re.Match[str], text: str) -> Verdict | None:
    before = _clause_before(text, match.start()) if match[4] else ""
    return None if _HEDGE.search(before) or _ANY_NOT.search(before) else _value(next(filter(None, match.groups()), ""))


def _first_line(text: str, start: int) -> str:
    return text[start : start + 200].split("\n", 1)[0]


def _line_before(text: str, start: int) -> str:
    return text[max(0, start - 200) : start].rpartition("\n")[2]


def _rank(text: str, match: re.Match[str]) -> int:
    """2 for a verdict that calls itself final or corrects an earlier one, else 0."""
    near = f"{_clause_before(text, match.start())} {match[0]}"
    return 2 if _FINAL.search(near) else 0


def _clause_before(text: str, start: int) -> str:
    return _CLAUSE.split(_line_before(text, start).rstrip(" ,:，：*`\"'“‘"))[-1]


def _is_list(match: re.Match[str], text: str) -> bool:
    """ "Conclusion: 1. Arlen was searched. 2. ...": the number of a list."""
    if not _LIST.match(text, match.end()):
        return False
    return "\n" in match[0] or _NEXT_ITEM.search(text, match.end(), match.end() + 2000) is not None


def _is_mention(match: re.Match[str], text: str) -> bool:
    """'It says "score: 1", which I ignore': a verdict in quotes, of others, or on something else."""
    before, after = _line_before(text, match.start()), _first_line(text, match.start())
    sentence = _SENTENCE.split(before)[-1] + _SENTENCE.split(after, maxsplit=1)[0]
    if _ANOTHER.search(before) or _IGNORED.search(sentence) or _is_reported(text, match.start()):
        return True
    return _is_quoted(before, after, len(match[0].rstrip("\"'“”‘’`「」『』*_ ")))


def _is_quoted(before: str, after: str, length: int) -> bool:
    """Whether the first ``length`` characters of ``after`` stand inside quotes, and not as the value of a label."""
    start, end = len(before), len(before) + length
    spans = (span for span in _QUOTED.finditer(before + after) if span.start() < start and span.end() > end)
    return any(not _LABEL_ENDS.search(before[max(0, span.start() - 60) : span.start()]) for span in spans)


def _is_hedged(match: re.Match[str], text: str) -> bool:
    sentence = _SENTENCE.split(_line_before(text, match.start()))[-1]
    return bool(_HEDGE.search(_clause_before(text, match.start())) or _CONDITION.match(sentence))


def _is_reported(text: str, start: int) -> bool:
    """Whether the clause before ``start`` tells what somebody else says."""
    return _REPORTS.search(_CLAUSE.split(_line_before(text, start).rstrip(" :：*`\"'“‘(["))[-1]) is not None


def _is_adjective(match: re.Match[str], text: str) -> bool:
    """Not a label: "The plan is not complete: 1 search is missing", or the legend "complete = 1, incomplete = 0"."""
    if (match[1] or "").lower() not in ("complete", "完整"):
        return False
    line = _line_before(text, match.start()).strip("\"'“”*`_#>- \t{,")
    return bool(line or re.search("[为為]", match[0]) or _LEGEND.search(text, match.start(), match.end() + 100))


def _value(text: str) -> Verdict | None:
    """Verdict at the start of ``text``: a number that is exactly 0 or 1, else the words of its first clause."""
    text = _WRAPPED.sub(r"\1", text.strip())
    number = _NUMBER.match(text)
    if not number:
        first = _CLAUSE.split(text, maxsplit=1)[0]
        said = _words(first)
        return None if said == 1 and _is_taken_back(text, len(first)) else said
    if not _ONE_DIGIT.fullmatch(number[0]) or _BEYOND.match(text, number.end()) or not _ALONE.match(text, number.end()):
        return None
    verdict: Verdict = 1 if "1" in number[0] else 0
    clauses = _CLAUSE.split(_SENTENCE.split(text[number.end() :], maxsplit=1)[0])[::2]
    words = set().union(*map(_clause_words, clauses))
    changed = _CHANGED if verdict == 0 else _LIMITED
    return None if words == {1 - verdict} or any(map(changed.search, clauses)) else verdict


def _agreeing(verdict: Verdict | None, number: re.Match[str] | None) -> Verdict | None:
    """None for "1 (incomplete)": a number in front that says the opposite of the words."""
    return None if number and verdict is not None and int(number[1]) != verdict else verdict


def _bare(line: str, alone: bool) -> Verdict | None:
    if alone:
        line = line.rstrip(" .")  # otherwise "1." is the number of a list
    match = _BARE.fullmatch(line)
    if match is None or _NUMBERED.fullmatch(line):
        return _explained(line) if alone else None
    return 1 if match[1] == "1" else 0


def _explained(line: str) -> Verdict | None:
    """Of "0: Brona is missing" or "1 - nothing is missing", where number and words agree."""
    match = _EXPLAINED.fullmatch(line.strip())
    if match is None or re.search(r"\b2[:.)]", line):
        return None
    lacks = _LACK.search(_NO_LACK.sub(" ", match[2])) is not None
    return int(match[1]) if lacks is (match[1] == "0") and not _HEDGE.search(match[2]) else None  # type: ignore[return-value]


def _tells(text: str) -> bool:
    """Whether the first clause says something about completeness, be it only that it cannot be told."""
    first = _CLAUSE.split(text, maxsplit=1)[0]
    return bool(_WORD.search(first) or _SHORT.match(first) or _HEDGE.search(first))


def _words(text: str) -> Verdict | None:
    """The verdict that all verdict words agree on; None without one, with a hedge, or where they contradict.

    The last of them overrules the others if it is a conclusion ("Therefore ..."). "Complete" gives way to what is said
    to be missing after it.
    """
    text = _EMPHASIS.sub("", text)
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
        if _ASKED.match(text, start) or _QUESTION.search(clause):
            asked = _ASKS_ALL.search(clause) is not None and not _LACK.search(clause)
            continue
        said = _short_words(clause) if asked and not _VALUED.match(text, start + len(clause)) else set()
        said |= _clause_words(clause)
        if 1 in said and (foreign or _CONDITION.match(_SENTENCE.split(text[max(0, start - 200) : start])[-1])):
            said = {None}
        if said and not others:
            yield start, start + max((match.end() for match in _WORD.finditer(clause)), default=len(clause)), said
        asked = asked and not clause.strip()
        others = mark.startswith(":") and _REPORTS.search(clause) is not None
        foreign = mark.startswith(":") and _INTRODUCES.fullmatch(clause) is None


def _is_taken_back(text: str, end: int) -> bool:
    """Whether what follows ``end`` says that something is missing after all, or only under a condition."""
    rest = text[end:]
    sentence = _SENTENCE.split(rest, maxsplit=1)[0]
    lacks = _LACK.search(_NO_LACK.sub(" ", rest)) or _TURNS.match(rest) or _HEDGE.search(sentence)
    return bool(lacks or _CROSS.search(text))


def _clauses(text: str) -> Iterator[tuple[int, str, str]]:
    """Place, clause, and the mark that ends it."""
    pieces, place = [*_CLAUSE.split(text), ""], 0
    for clause, mark in zip(pieces[::2], pieces[1::2], strict=True):
        yield place, clause, mark
        place += len(clause) + len(mark)


def _opens(text: str, start: int) -> bool:
    """Whether the sentence around ``start`` opens as a conclusion."""
    sentence = _SENTENCE.split(text[max(0, start - 200) : start])[-1] + text[start : start + 40]
    return _CONCLUDES.match(sentence) is not None


def _short_words(clause: str) -> set[Verdict | None]:
    short = _SHORT.match(clause)
    if not short:
        return set()
    return {1 if short["yes"] else 0, *(1 if "1" in match[0] else 0 for match in _MAPPED.finditer(clause))}


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
    if _REPORTS.search(before):
        return set()
    if match["done"]:
        return {0} if near and not hedged else set()
    if hedged or (_ANY_NOT.search(before) and not (near and match["yes"])):
        return {None}
    if near and _TWICE_NOT.search(before[: near.start()]):
        return {None}
    if match["no"] or near:
        return {0}
    asserted = _SUBJECT.fullmatch(before) is not None and _NO_SUBJECT.match(before) is None
    ends = match["yes"].isascii() or _AFTER.match(clause, match.end()) is not None
    return {1} if asserted and ends else {None}


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
    ends = r"(?![\w+'’-]|\s*(?:or\b|/|或)|\s(?:is|was)\b)"
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
