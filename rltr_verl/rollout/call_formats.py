"""Calls in other families' styles, read by verl's own parsers under the rules of :mod:`rltr_verl.parsing`.

verl's parsers skip what they cannot read, with a line in the log, and some put something in its place: ``{}`` for bad
JSON, False for a boolean that is neither. Here every block is held against its family's grammar first and given to the
parser call by call; what does not match, or does not come back, is an unreadable call. Thoughts, stop marker and format
faults are those of :func:`rltr_verl.parsing.parse_turn`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from rltr_verl.call_styles import FormatWatch
from rltr_verl.errors import ConfigError
from rltr_verl.parsing import Block, Grammar, one_for_all, parse_turn, parse_with, to_call, unreadable_block
from rltr_verl.trajectory import ToolCall, Turn

if TYPE_CHECKING:
    from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

logger = logging.getLogger(__name__)

Read = Callable[[str], Turn]


def _value(*tags: str) -> str:
    """A text in which none of ``tags`` begins."""
    stop = "|".join(tags)
    return rf"[^<]*(?:<(?!{stop})[^<]*)*"


_XML = _value("/?parameter[=>]", "/?function[=>]", "/?(?:seed:)?tool_call>")
_INVOKE = _value("/?parameter[ >]", "/?invoke[ >]", "/?minimax:tool_call>")
_HARMONY = _value(r"\|(?:call|start|end)\|")
_GLM = _value("/?arg_key", "/?arg_value", "/?tool_call")
_DSML = _value("/?｜DSML｜")
_KIMI = _value(r"\|tool_call")
_GEMMA = r"\w+:(?:<\|\"\|>[^<]*(?:<(?!\|\"\|>|\|?tool_call)[^<]*)*<\|\"\|>|[^<>,:{}\[\]\"]*)"


@dataclass(frozen=True)
class Family:
    """How a parser of verl wants its calls: marks around a block, one call, one argument (group 1 name, 2 value).

    ``call`` has a group ``name`` and a group ``body``. Without ``argument`` the body is JSON. ``mark`` finds an opening
    that varies; ``thought`` opens and closes a thought where that is not ``<think>``; ``single``: one call a block;
    ``quote`` stands around texts that are taken as they are.
    """

    opening: str
    closing: str
    call: str
    argument: str = ""
    mark: str = ""
    thought: tuple[str, str] | None = None
    name: Callable[[str], str] = str.strip
    single: bool = False
    quote: str = ""

    @property
    def mark_pattern(self) -> str:
        return self.mark or re.escape(self.opening)


def _kimi_name(identifier: str) -> str:
    """``functions.search:0`` is call 0 of ``search``."""
    return re.sub(r"^functions\.|:\d+$", "", identifier.strip())


FAMILIES: Mapping[str, Family] = {
    "qwen3_coder": Family(
        "<tool_call>",
        "</tool_call>",
        rf"<function=(?P<name>[^<>\s]+)>(?P<body>\s*(?:<parameter=[^<>\s]+>{_XML}</parameter>\s*)*)</function>",
        rf"<parameter=([^<>\s]+)>({_XML})</parameter>",
    ),
    "glm": Family(
        "<tool_call>",
        "</tool_call>",
        rf"(?P<name>[\w.:-]+)(?P<body>\s*(?:<arg_key>{_GLM}</arg_key>\s*<arg_value>{_GLM}</arg_value>\s*)*)",
        rf"<arg_key>({_GLM})</arg_key>\s*<arg_value>({_GLM})</arg_value>",
        single=True,
    ),
    "seed": Family(
        "<seed:tool_call>",
        "</seed:tool_call>",
        rf"<function=(?P<name>[^<>\s]+)>(?P<body>\s*(?:<parameter=[^<>\s]+>{_XML}</parameter>\s*)*)</function>",
        rf"<parameter=([^<>\s]+)>({_XML})</parameter>",
    ),
    "minimax": Family(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        r'<invoke name="(?P<name>[^"<>]+)">'
        rf'(?P<body>\s*(?:<parameter name="[^"<>]+">{_INVOKE}</parameter>\s*)*)</invoke>',
        rf'<parameter name="([^"<>]+)">({_INVOKE})</parameter>',
    ),
    "deepseek_v4": Family(
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        r'<｜DSML｜invoke name="(?P<name>[^"<>]+)">'
        rf'(?P<body>\s*(?:<｜DSML｜parameter name="[^"<>]+" string="(?:true|false)">{_DSML}</｜DSML｜parameter>\s*)*)'
        r"</｜DSML｜invoke>",
        rf'<｜DSML｜parameter name="([^"<>]+)" string="(?:true|false)">({_DSML})</｜DSML｜parameter>',
    ),
    "kimi": Family(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        rf"<\|tool_call_begin\|>(?P<name>[^<>]+)<\|tool_call_argument_begin\|>(?P<body>{_KIMI})<\|tool_call_end\|>",
        name=_kimi_name,
    ),
    "gemma4": Family(
        "<|tool_call>",
        "<tool_call|>",
        rf"call:(?P<name>\w+)\{{(?P<body>(?:{_GEMMA}(?:,{_GEMMA})*)?)\}}",
        r"(\w+):((?:<\|\"\|>.*?<\|\"\|>)|[^<>,:{}\[\]\"]*)",
        thought=(r"<\|channel>thought\b", r"<channel\|>"),
        quote='<|"|>',
    ),
    "gpt-oss": Family(
        "<|start|>assistant<|channel|>",
        "<|call|>",
        rf"[^<]* to=functions\.(?P<name>[^<\s]+) <\|constrain\|>json<\|message\|>(?P<body>{_HARMONY})",
        mark=r"<\|(?:start\|>assistant<\|)?channel\|>(?=[^<]{0,200}to=)",
        thought=(r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>", r"<\|end\|>"),
    ),
}
"""The grammars of verl's parsers; ``hermes`` is read by :func:`rltr_verl.parsing.parse_turn` itself."""


def read_calls_with(
    name: str, tokenizer: Any, *, schemas: Iterable[Mapping[str, Any]] = (), prefilled_think: bool = False
) -> Read:
    """A function that reads one assistant turn whose calls are written as verl's parser ``name`` reads them.

    It also warns, once, where the policy keeps writing calls in another style.

    Args:
        name: ``rltr.rollout.format``.
        tokenizer: the policy's; parsers look up their control tokens in it.
        schemas: OpenAI schemas of the tools. Families that write arguments as bare text take the types from them.
        prefilled_think: the prompt opens ``<think>``.

    Raises:
        ConfigError: verl has no parser of that name, or one whose grammar is not known here.
    """
    watch = FormatWatch(name)
    if name == "hermes":
        read: Read = partial(parse_turn, prefilled_think=prefilled_think)
    else:
        read = _family_reader(name, tokenizer, schemas, prefilled_think)

    def read_and_watch(text: str) -> Turn:
        turn = read(text)
        watch.see(turn)
        return turn

    return read_and_watch


def stop_token_ids(name: str, tokenizer: Any) -> list[int]:
    """Ids that must end a turn of this family besides the tokenizer's own end of turn, so that its calls can run."""
    _known(name)
    unknown = getattr(tokenizer, "unk_token_id", None)
    ids = _verl_parsers().get_tool_parser(name, _Texts(tokenizer)).stop_token_ids
    return [token for token in ids if isinstance(token, int) and token != unknown]


def _verl_parsers() -> type[ToolParser]:
    """Imported when another format than hermes is read: where turns are only replayed, verl need not be loaded."""
    from verl.experimental.agent_loop.tool_parser import ToolParser

    return ToolParser


def _known(name: str) -> None:
    if name in FAMILIES or name == "hermes":
        return
    names = sorted(_verl_parsers()._registry)
    readable = ", ".join(other for other in names if other in FAMILIES or other == "hermes")
    problem = f"verl has no tool parser '{name}' (it has {', '.join(names)})"
    if name in names:
        problem = f"the grammar of verl's tool parser '{name}' is not known, so a call that it skips would not be seen"
    raise ConfigError(problem, where="rltr.rollout.format", fix=f"use one of {readable}.")


def _family_reader(name: str, tokenizer: Any, schemas: Iterable[Mapping[str, Any]], prefilled_think: bool) -> Read:
    _known(name)
    parser = _verl_parsers().get_tool_parser(name, _Texts(tokenizer))
    reader = _FamilyReader(name, FAMILIES[name], parser, list(schemas))
    return lambda text: parse_with(reader.grammar, text, prefilled_think, reader.thoughts_marked(text))


class _Texts:
    """A tokenizer for parsers that are given text: nothing is left to decode, and nothing is stripped as padding."""

    pad_token = ""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, text: str, **kwargs: Any) -> str:
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@dataclass
class _FamilyReader:
    """Reads blocks of one family: our grammar finds and checks the calls, verl's parser reads them."""

    name: str
    family: Family
    parser: ToolParser
    schemas: list[Mapping[str, Any]]
    properties: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        functions = [schema.get("function", schema) for schema in self.schemas]
        self.properties = {
            str(item.get("name")): (item.get("parameters") or {}).get("properties") or {} for item in functions
        }
        # Kimi's parser replaces an unknown name by the tool that it takes for the nearest, so it is shown none.
        self._shown = [] if self.name == "kimi" else [_as_verl(*item) for item in self.properties.items()]
        self._call = re.compile(rf"\s*{self.family.call}\s*")
        self._close = re.compile(re.escape(self.family.closing))
        quote = re.escape(self.family.quote)
        self._quoted = re.compile(f"{quote}.*?{quote}", re.DOTALL) if quote else None
        self._argument = re.compile(self.family.argument, re.DOTALL) if self.family.argument else None
        self.grammar = Grammar.of(self.name, self.family.mark_pattern, re.escape(self.family.closing), self.read_block)

    def thoughts_marked(self, text: str) -> str:
        """``text`` with the family's own marks around thoughts written as ``<think>``."""
        if self.family.thought is None:
            return text
        opening, closing = self.family.thought
        text = re.sub(rf"{opening}(?P<inside>.*?)(?P<closing>{closing}|\Z)", _as_think, text, flags=re.DOTALL)
        return _FINAL.sub("", text)

    def read_block(self, text: str, start: int) -> Block:
        """All calls from ``start``, behind the opening, to the closing; anything else makes it one unreadable call."""
        found: list[re.Match[str]] = []
        position = start
        while match := self._call.match(text, position):
            found.append(match)
            position = match.end()
        close = self._close.match(text, position)
        if not found or close is None or (self.family.single and len(found) > 1):
            return unreadable_block(self.grammar, text, start, f"not as '{self.name}' writes a call")
        calls = [self._read_call(match) for match in found]
        return Block(one_for_all(calls, text[start:position]), close.end())

    def _read_call(self, match: re.Match[str]) -> ToolCall:
        raw, name = match.group().strip(), self.family.name(match.group("name"))
        # verl's parser of gemma4 cuts a text at a line's end, so it is given empty ones, and _checked puts them in
        shown = self._quoted.sub(self.family.quote * 2, raw) if self._quoted else raw
        text = cast(Any, f"{self.family.opening}{shown}{self.family.closing}")  # in place of ids, see _Texts
        read = _wait_for(self.parser.extract_tool_calls(text, self._shown))
        if len(read) != 1:
            return ToolCall(name, None, raw, f"verl's parser '{self.name}' reads no call in it")
        if self._argument is None:
            return to_call({"name": name, "arguments": match.group("body")}, raw)
        call = to_call({"name": name, "arguments": read[0].arguments}, raw)
        return call if call.error else self._checked(call, self._argument.findall(match.group("body")))

    def _checked(self, call: ToolCall, written: list[tuple[str, ...]]) -> ToolCall:
        """The call with texts as they were written where the schema asks for text; what verl made up is refused."""
        arguments = dict(call.arguments or {})
        if len(arguments) != len(written) or {pair[0].strip() for pair in written} != set(arguments):
            return ToolCall(call.name, None, call.raw, "an argument is given twice or cannot be read")
        types = self.properties.get(call.name or "", {})
        for key, text in ((pair[0].strip(), pair[1]) for pair in written):
            quote = self.family.quote
            if quote and text.startswith(quote):
                arguments[key] = text.removeprefix(quote).removesuffix(quote)
                continue
            kind, value = _type(types.get(key)), arguments[key]
            made_up = kind == "boolean" and text.strip().lower() not in ("true", "false", "null")
            if made_up or (kind == "string" and not isinstance(value, (str, type(None)))):
                arguments[key] = text.strip()
        return ToolCall(call.name, arguments, call.raw)


_FINAL = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>"
    r"|<\|(?:end|return)\|>(?=\s*(?:\Z|<\|start\|>assistant))"
)
"""Marks of gpt-oss around text that is shown."""


def _as_think(match: re.Match[str]) -> str:
    return f"<think>{match['inside']}" + ("</think>" if match["closing"] else "")


def _type(schema: Mapping[str, Any] | None) -> str | None:
    """JSON type of an argument; of several, the first that is not null."""
    variants = (schema or {}).get("anyOf") or [schema or {}]
    given = [item.get("type") for item in variants]
    flat = [kind for item in given for kind in (item if isinstance(item, list) else [item])]
    return next((kind for kind in flat if kind not in (None, "null")), None)


def _as_verl(name: str, properties: Mapping[str, Mapping[str, Any]]) -> Any:
    """A tool as verl's parsers look at it. verl's own class refuses schemas that pydantic writes (``anyOf``)."""
    shown = {key: SimpleNamespace(model_dump=partial(dict, type=_type(value))) for key, value in properties.items()}
    parameters = SimpleNamespace(properties=shown, required=[])
    return SimpleNamespace(type="function", function=SimpleNamespace(name=name, parameters=parameters))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """verl's parsers are coroutines that use an executor; they run in a loop of their own, beside the caller's."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rltr-call-formats", daemon=True).start()
    return loop


def _wait_for(reading: Any) -> list[FunctionCall]:
    content_and_calls = asyncio.run_coroutine_threadsafe(reading, _loop()).result()
    return list(content_and_calls[1])
