"""How a verdict is asked for: as constrained output where the server can, as free text where it refuses.

In order: a JSON schema (OpenAI, vLLM, SGLang), which keeps the judge's reason; a choice between "0" and "1" (vLLM's
``structured_outputs``, with SGLang's ``regex`` beside it, each ignored by the other server); the choice of vLLM before
0.12 (``guided_choice``); nothing. A refusal is remembered per URL. A server that silently ignores the constraint does
no harm: every reply goes through ``parse_verdict``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from rltr_verl.judge.replies import ChatFailed

Mode = Literal["auto", "json_schema", "choice", "off"]

_SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "verdict": {"type": "integer", "enum": [0, 1]}},
    "required": ["reason", "verdict"],
    "additionalProperties": False,
}
"""The reason comes first, so that the verdict follows from it."""

_FIELDS: dict[str, Mapping[str, Any]] = {
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "verdict", "schema": _SCHEMA, "strict": True},
        }
    },
    "choice": {"structured_outputs": {"choice": ["0", "1"]}, "regex": "[01]"},
    "guided_choice": {"guided_choice": ["0", "1"]},
    "free": {},
}
_FORMS: dict[Mode, tuple[str, ...]] = {
    "auto": ("json_schema", "choice", "guided_choice", "free"),
    "json_schema": ("json_schema", "free"),
    "choice": ("choice", "guided_choice", "free"),
    "off": ("free",),
}
_NAMES = {name for fields in _FIELDS.values() for name in fields} | {
    "json_schema",
    "ebnf",
    "guided_json",
    "guided_regex",
}
_NAMED = re.compile(
    r"response[_ ]format|json[_ ]?schema|structured[_ ]?output|guided|grammar|constrained|xgrammar|outlines", re.I
)
_VAGUE = re.compile(
    r"\b(?:schema|regex)\b|(?:unknown|unrecogni[sz]ed|unexpected|unsupported|invalid|extra|additional)"
    r" (?:request )?(?:field|key|argument|parameter|propert|input)"
    r"|extra[_ ](?:inputs|fields|forbidden)|not (?:supported|permitted|allowed)",
    re.I,
)


class StructuredOutput:
    """Which constraint each URL is asked with.

    Args:
        mode: ``rltr.judge.structured``.
        thinking: with reasoning on, a choice would be forced upon the reasoning itself where the server does not keep
            the two apart, so that only the schema is tried.
        given: further fields of every request; where they constrain the output, nothing is added to them.
    """

    def __init__(self, mode: Mode, thinking: bool | None = None, given: Collection[str] = ()) -> None:
        forms = _FORMS["off" if _NAMES & set(given) else mode]
        self._forms = tuple(form for form in forms if not thinking or "choice" not in form)
        self._refused: dict[str, int] = {}

    def form(self, url: str) -> str:
        """json_schema, choice, guided_choice or free: how ``url`` is asked now."""
        return self._forms[self._refused.get(url, 0)]

    def fields(self, url: str) -> Mapping[str, Any]:
        """What to add to a request for ``url``."""
        return _FIELDS[self.form(url)]

    def refused(self, failure: ChatFailed) -> bool:
        """Whether ``failure`` is a refusal of the constraint; if so, its URL is not asked that way again."""
        if not failure.sent or not _is_refusal(failure):
            return False
        if failure.sent is self.fields(failure.url):
            self._refused[failure.url] = self._refused.get(failure.url, 0) + 1
        return True


def _is_refusal(failure: ChatFailed) -> bool:
    """A 400 or 422 that speaks of constraints or of a field it does not know, or a 500 or 501 that names them."""
    if failure.status in (400, 422):
        return failure.kind == "http" and bool(_NAMED.search(failure.body) or _VAGUE.search(failure.body))
    return failure.status in (500, 501) and bool(_NAMED.search(failure.body))
