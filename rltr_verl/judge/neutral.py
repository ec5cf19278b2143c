"""Text of the policy and of tools, made harmless for a judge's chat template and for whoever reads the judge's reply.

A dot (``·``, U+00B7) is put inside whatever could be taken for structure; taking it out again gives the text back:

====================================  ====================================
chat-template tokens, role marks      ``<·|im_start|>`` ``[·INST]``
tags of the conversation              ``<·/think>`` ``<·tool_response>``
bracketed verdicts                    ``[·[1]]`` ``\\·boxed{1}``
labelled verdicts, JSON keys too      ``Score·: 1`` ``"score·": 1`` ``评分·：1``
the delimiters of a record            ``END· 0f3a9c...``
====================================  ====================================

Full-width and other look-alike letters count as what they look like. Everything else passes as it is: prose, code,
URLs, JSON whose values are no verdicts (``"score": 0.87``).
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from rltr_verl.judge.verdict_patterns import EQUALS, LABELS, SCALE, WEAK_LABELS

MARK = "·"

_GAP = r"[\"'“”‘’「」『』【】*`_\s]{0,9}"
_VALUE = (
    r"(?:[-+]?[01](?:\.0+)?(?![\d.]*\d|\s?%)|(?:true|false|yes|no|null|pass|passed|fail|failed)\b"
    r"|[^\n.。!！?？]{0,40}?(?:complete|完[整备備成])|[是否]|[不未]?通[过過]|[\[{(])"
)
_NAMES = (
    r"think(?:ing)?|thought|reasoning|analysis|scratchpad|reflection|tool_(?:call|response|result)s?|tools|function_calls?|system|user"
    rf"|assistant|s|bos|eos|pad|unk|(?:start|end)_of_turn|{LABELS}|{WEAK_LABELS}"
)
_STRUCTURE = re.compile(
    rf"<(?=\|[^<>|\s]{{1,40}}\|?>|/?(?:{_NAMES})\b[^<>\n]{{0,40}}>|</?sys>>)"
    r"|\[(?=/?(?:inst|system_prompt|tool_calls|tool_results|available_tools|think|gmask|bos|eos|cls|sep)\])"
    rf"|\[(?=\s{{0,9}}\[\s{{0,9}}[\"'*]{{0,4}}(?:{_VALUE}|[a-e])[\"'*\s]{{0,9}}\]\s{{0,9}}\])"
    r"|\\(?=boxed\b)|◁(?=/?think▷)"
    r"|\b(?:begin|end)(?=\s{1,9}[0-9a-f]{6,}\b)",
    re.IGNORECASE,
)
_LABELLED = re.compile(
    rf"(?:(?<![a-z_])(?:{LABELS})|(?:^[*_#>\-\s]{{0,9}}|(?<=[\"'“]))(?:{WEAK_LABELS}))"
    rf"(?={_GAP}\]?{SCALE}{_GAP}{EQUALS}{_GAP}{_VALUE})",
    re.IGNORECASE | re.MULTILINE,
)


def neutralise(text: str) -> str:
    """``text`` with a dot inside every mark of structure and every labelled verdict; see the module. Linear time."""
    plain = text if text.isascii() else text.translate(_look_alikes())
    places = sorted({match.end() for rule in (_STRUCTURE, _LABELLED) for match in rule.finditer(plain)})
    if not places:
        return text
    return MARK.join(text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True))


@lru_cache(maxsize=1)
def _look_alikes() -> dict[int, str]:
    """Characters that NFKC turns into one other character, so that places in both texts agree."""
    blocks = (range(0x80, 0x3400), range(0xF900, 0x10000), range(0x1D400, 0x1D800))
    folded = {code: unicodedata.normalize("NFKC", chr(code)) for block in blocks for code in block}
    return {code: form for code, form in folded.items() if len(form) == 1 and form != chr(code)}
