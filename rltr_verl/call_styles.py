"""How model families write tool calls and roles, so that a call in a foreign style is seen and named.

A style marks its calls by text that no prose holds. ``parser`` is the name under which verl reads it
(``rltr.rollout.format``), None where verl has no parser for it.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rltr_verl.trajectory import Turn

logger = logging.getLogger(__name__)

_SOUGHT = (
    "function_calls?",
    "functioncall",
    "tool_calls?",
    "toolcalls?",
    "tool_use",
    "use_tool",
    "tool_code",
    "invoke",
)
_NAMES = "|".join(_SOUGHT)


@dataclass(frozen=True)
class Style:
    """Opening and closing of a call, as regular expressions of bounded length; a tag's opening starts with ``<``."""

    family: str
    parser: str | None
    opening: str
    closing: str


HERMES = Style("Hermes", "hermes", "<tool_call>", "</tool_call>")

TAGGED = (
    HERMES,
    Style("Qwen3-Coder", "qwen3_coder", r"<function=", r"</function>"),
    Style("GLM", "glm", r"<arg_key>", r"</arg_value>(?!\s*<arg_key>)"),
    Style("Seed", "seed", r"<seed:tool_call>", r"</seed:tool_call>"),
    Style("MiniMax", "minimax", r"<minimax:tool_call>", r"</minimax:tool_call>"),
    Style("Kimi", "kimi", r"<\|tool_calls_section_begin\|>", r"<\|tool_calls_section_end\|>"),
    Style("Kimi", "kimi", r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>"),
    Style("DeepSeek-V4", "deepseek_v4", r"<｜DSML｜\w+", r"</｜DSML｜(?:tool|function)_calls>"),
    Style("Gemma 4", "gemma4", r"<\|tool_call>", r"<tool_call\|>"),
    Style("gpt-oss", "gpt-oss", r"<\|(?:start\|>assistant<\|)?channel\|>(?=[^<]{0,200}to=)", r"<\|call\|>"),
    Style("gpt-oss", "gpt-oss", r"<\|start\|>assistant(?= to=)", r"<\|call\|>"),
    Style("DeepSeek", None, r"<｜tool▁calls?▁begin｜>", r"<｜tool▁calls▁end｜>"),
    Style("Llama", None, r"<\|python_(?:tag|start)\|>", r"<\|(?:eom_id|eot_id|python_end)\|>"),
    Style("Granite", None, r"<\|tool_call\|>", r"<\|/tool_call\|>"),
    Style("Command R", None, r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"),
    Style("InternLM", None, r"<\|action_start\|>", r"<\|action_end\|>"),
    Style("Search-R1", None, r"<search>", r"</search>"),
    Style(
        "XML", None, rf"<(?i:(?:\w{{1,16}}:)?(?:{_NAMES}))\b[^<>]{{0,200}}>", rf"</(?i:(?:\w{{1,16}}:)?(?:{_NAMES}))>"
    ),
)
"""Styles that a tag or control token opens, in the order in which they are tried."""

_SHORT = r"(?:\"[^\"\n]{1,100}\"|'[^'\n]{1,100}')"
_NEXT = r"\s{0,9},\s{0,50}"


def _key(names: str) -> str:
    return rf"[\"'](?:{names})[\"']\s{{0,9}}:\s{{0,50}}"


_PLAIN_JSON = (
    rf"\{{\s{{0,50}}(?:{_key('type|id')}{_SHORT}{_NEXT}){{0,2}}{_key('name|tool|function|tool_name|action')}"
    rf"(?:{_SHORT}|\{{\s{{0,50}}{_key('name')}{_SHORT}){_NEXT}"
    rf"{_key('arguments|parameters|args|input|tool_input|action_input')}"
    rf"|\{{\s{{0,50}}{_key('arguments|parameters')}\{{"
)
"""An object, of JSON or of Python, with a name and arguments behind it, or that begins with arguments."""

PLAIN = (
    Style("Mistral", None, r"\[TOOL_CALLS\]", r"$"),
    Style("Qwen 2", None, r"✿FUNCTION✿", r"$"),
    Style("ReAct", None, r"^[ \t]*Action[ \t]*:[^\n]{1,200}\n\s{0,20}Action Input[ \t]*:", r"$"),
    Style("plain JSON", None, _PLAIN_JSON, r"$"),
    Style("Gemma 3", None, r"^[ \t]*```tool_c(?:ode|all)\b", r"$"),
    Style(
        "odd brackets", None, r"(?:&lt;|[＜〈\[{])(?i:tool_calls?|function_calls?|function=\w+)(?:&gt;|[＞〉\]}])", r"$"
    ),
    Style("plain Python", None, r"^[ \t]*\[[ \t]*[A-Za-z_][\w.]{0,80}\((?:\)|[A-Za-z_]\w{0,80}[ \t]*=)", r"$"),
)
"""Styles that plain text opens; looked for in what a turn shows, at the start of a line where ``^`` stands."""

PLAIN_MARKS = ("{", "[", "✿", "Action Input", "```tool_c", "&lt;", "＜", "〈")
"""Without any of these in a text, none of :data:`PLAIN` can be there."""

ROLES = (
    r"<(?:[|｜](?:im_start|im_end|endoftext|begin_of_text|end_of_text|start_header_id|end_header_id|eot_id|eom_id|ipython"
    r"|im_user|im_assistant|im_system|im_middle|user|assistant|system|observation|tool|start|end|message|return"
    r"|START_OF_TURN_TOKEN|END_OF_TURN_TOKEN|User|Assistant|begin▁of▁sentence|end▁of▁sentence)[|｜]"
    r"|(?:start|end)_of_turn|\|turn|turn\|)>"
)
"""Tokens that open or close a role in some family's chat template."""

RESPONSES = (
    r"<(?:/?(?i:tool_responses?|tool_results?|tool_outputs?|function_results?|function_response|observation|information)"
    r"\s{0,3}|｜tool▁outputs?▁(?:begin|end)｜|\|tool_response|tool_response\|)>"
)
"""Tags around what a tool returned."""

PLAIN_ROLES = re.compile(r"\[/?INST\]")
PLAIN_RESPONSES = re.compile(r"\[/?TOOL_RESULTS\]|✿RESULT✿")

_ENDS = ("im_end", "endoftext", "eot_id", "eom_id", "end_of_text", "end", "return", "user", "observation")
TURN_ENDS = (
    *(f"<|{name}|>" for name in (*_ENDS, "END_OF_TURN_TOKEN")),
    *("</s>", "<eos>", "<end_of_turn>", "<turn|>", "<｜end▁of▁sentence｜>"),
)
"""Tokens that end an assistant turn; at the end of a text they are no fault."""

_ANY = re.compile("|".join(f"(?P<s{index}>{style.opening})" for index, style in enumerate(TAGGED)))
_JSON_CALL = re.compile(r'\s*[\[{]\s*[{"]')
_REASON = re.compile(r"written as (.+) writes calls, not as '")


def style_of(raw: str) -> Style | None:
    """The style in which the inside of an unreadable block seems to be written."""
    head = raw[:2000]
    if _JSON_CALL.match(head):
        return HERMES
    match = _ANY.search(head)
    return TAGGED[int((match.lastgroup or "s0")[1:])] if match else None


def foreign_reason(expected: str, style: Style | None) -> str:
    """``ToolCall.error`` of a call in ``style`` where another one is read."""
    if style is None or style.parser == expected:
        return f"not as '{expected}' marks a call"
    return f"written as {style.family} writes calls, not as '{expected}'"


def foreign_style(error: str | None) -> Style | None:
    """The style that :func:`foreign_reason` named."""
    match = _REASON.match(error or "")
    return next((style for style in (*TAGGED, *PLAIN) if style.family == match.group(1)), None) if match else None


class FormatWatch:
    """Warns once when the policy writes its calls in another style than the one that is read.

    Args:
        expected: the style that is read, by verl's name.
        after: foreign calls seen before the warning; no warning comes while most calls can be read.
    """

    def __init__(self, expected: str, after: int = 3) -> None:
        self._expected, self._after = expected, after
        self._readable = 0
        self._foreign: dict[tuple[str, str | None], int] = {}
        self._warned = False

    def see(self, turn: Turn) -> None:
        """Count the calls of a turn."""
        if self._warned:
            return
        for call in turn.calls:
            if call.error is None:
                self._readable += 1
            elif style := foreign_style(call.error):
                key = (style.family, style.parser)
                self._foreign[key] = self._foreign.get(key, 0) + 1
        if sum(self._foreign.values()) >= max(self._after, self._readable + 1):
            self._warn()

    def _warn(self) -> None:
        self._warned = True
        (family, parser), _ = max(self._foreign.items(), key=lambda item: item[1])
        if parser:
            fix = f"set rltr.rollout.format={parser}"
        else:
            fix = "verl has no parser for it: use a chat template or a cold start that teaches one of its formats"
        count = sum(self._foreign.values())
        logger.warning(
            "tool format mismatch: %d calls are written as %s writes them, but rltr.rollout.format=%s reads others; %s",
            *(count, family, self._expected, fix),
        )
