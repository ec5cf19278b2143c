"""What a tool must hold to so that it cannot harm a rollout, as checks that can be run on a user's file.

Each check makes real calls under the runner that training uses. A check that does not apply to a tool is skipped with
the reason.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jsonschema

from rltr_verl.errors import ConfigError, RltrError
from rltr_verl.schemas import argument_problem
from rltr_verl.tool_arguments import coerced
from rltr_verl.tool_guard import CallLimits
from rltr_verl.tool_runner import ToolRunner
from rltr_verl.tool_workers import LOOP
from rltr_verl.tooling import Tool, check_tools, load_tools
from rltr_verl.trajectory import Observation, Status, ToolCall

Verdict = Literal["ok", "failed", "skipped"]

SHOWN_CHARS = 60
"""How much of a result a finding repeats."""

CALLS_AT_ONCE = 16
MAX_CHARS = 1_000_000
BLOCKED_S = 0.5
CANCEL_S = 1.0
BEAT_S = 0.01
"""Bounds of the checks (ours): calls of the check ``concurrency``, longest result, longest time that an async tool may
hold its event loop, and time that a cancelled one may take to end. The two times are counted in beats of another event
loop of the process: a machine that is too busy to run either of them stops both."""


@dataclass(frozen=True)
class Finding:
    """What one check says of one tool."""

    tool: str
    check: str
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True)
class Subject:
    """A tool under test: ``arguments`` of a good call, seconds that a call may take; what its calls have raised."""

    tool: Tool
    arguments: Mapping[str, Any]
    given: bool
    timeout_s: float
    raised: list[Exception] = field(default_factory=list)

    def runner(self) -> ToolRunner:
        """A runner without retries, rest and cache, so that every call is seen as it is."""
        limits = CallLimits(timeout_s=self.timeout_s, retries=0, rest_after=10**9)
        name = self.tool.name
        tool = replace(self.tool, call=_keeping(self.tool, self.raised))
        return ToolRunner({name: tool}, limits={name: limits}, max_output_chars=4 * MAX_CHARS)

    def call(self, arguments: Mapping[str, Any] | None = None) -> ToolCall:
        """A call, by default the good one."""
        return ToolCall(self.tool.name, dict(self.arguments if arguments is None else arguments), "")

    async def observe(self, arguments: Mapping[str, Any] | None = None, times: int = 1) -> list[Observation]:
        """Make a call, by default the good one, in as many trajectories at once."""
        runner, call = self.runner(), self.call(arguments)
        return [seen for (seen,) in await asyncio.gather(*(runner.run([call]) for _ in range(times)))]


class Skip(Exception):
    """The check does not apply; the message says why."""


class Broken(Exception):
    """The tool does not hold to the check; the message says how and what to do."""


Check = Callable[[Subject], Awaitable[str]]


async def schema(subject: Subject) -> str:
    """The schema is one that models and servers take, and the good call fits it."""
    function = subject.tool.schema["function"]
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", function["name"]):
        raise Broken("its name is not 1 to 64 letters, digits, _ and -; models cannot call it")
    try:
        jsonschema.Draft202012Validator.check_schema(function["parameters"])
    except jsonschema.SchemaError as error:
        raise Broken(f"its parameters are no JSON schema ({error.message})") from None
    problem = argument_problem(subject.tool.parameters, subject.arguments)
    if problem:
        raise Broken(f"the arguments tried do not fit its schema ({problem}); give others with --arguments")
    bare = [name for name, item in function["parameters"].get("properties", {}).items() if "description" not in item]
    return f"no description of: {', '.join(bare)}" if bare else ""


async def settings(subject: Subject) -> str:
    """The tool's own check accepts its settings."""
    if subject.tool.check is None:
        raise Skip("it has no check of its settings")
    try:
        await asyncio.to_thread(check_tools, {subject.tool.name: subject.tool})
    except ConfigError as error:
        raise Broken(str(error)) from None
    return ""


async def answers(subject: Subject) -> str:
    """A good call ends in time and without an untyped exception."""
    (seen,) = await subject.observe()
    if seen.status is Status.INFRASTRUCTURE:
        raise Broken(f"{_cause(subject, seen)} {_advice(subject)}")
    if seen.status is Status.TIMEOUT:
        raise Broken(f"{seen.text} Bound its work, or give it longer with --timeout.")
    if seen.status is not Status.OK and subject.given:
        raise Broken(f"the call that was given ends in {seen.status.value}: {seen.text}")
    if seen.status is not Status.OK:
        return f"{seen.status.value} ({_begin(seen.text)}); try a good call with --arguments"
    return f"gave {_begin(seen.text)}"


async def odd_arguments(subject: Subject) -> str:
    """Whatever fits the schema ends in time and in a typed status."""
    tried = 0
    for arguments in _odd(subject):
        tried += 1
        (seen,) = await subject.observe(arguments)
        if seen.status in (Status.INFRASTRUCTURE, Status.TIMEOUT):
            problem = f"{_short(arguments)} ends in {seen.status.value}: {_cause(subject, seen)}"
            raise Broken(f"{problem} Raise BadArguments for what the tool cannot take.")
    if not tried:
        raise Skip("it takes no text and no number")
    return f"{tried} calls"


async def timeout(subject: Subject) -> str:
    """The tool lets others work while it is busy: an async one does not block its event loop."""
    if not subject.tool.is_async:
        raise Skip("it is a plain function and runs in a thread")
    beats = _Beats()
    watch = LOOP.submit(beats.of_the_tools)
    beating = asyncio.create_task(beats.of_ours())
    await subject.observe()
    beating.cancel()
    watch.give_up()
    held_s = beats.most * BEAT_S
    if held_s > BLOCKED_S:
        fix = "await what it waits for, or write it as a plain def, which runs in a thread"
        raise Broken(f"it held its event loop for {held_s:.1f} s or more; {fix}")
    return ""


async def cancel(subject: Subject) -> str:
    """A cancelled call ends soon."""
    if not subject.tool.is_async:
        raise Skip("it is a plain function, which nothing can cancel")
    if subject.tool.state is not None:
        raise Skip("it has state, which a call alone does not have")
    started, ended = threading.Event(), threading.Event()
    job = LOOP.submit(lambda: _until_ended(subject, started, ended))
    if not await asyncio.to_thread(started.wait, subject.timeout_s):
        raise Broken("its call did not start, since another call blocks the tools' event loop")
    await asyncio.sleep(0.01)
    job.give_up()
    for _ in range(round(CANCEL_S / BEAT_S)):
        if ended.is_set():
            return ""
        await asyncio.sleep(BEAT_S)
    raise Broken(f"it goes on for more than {CANCEL_S:g} s when cancelled; let CancelledError pass")


async def concurrency(subject: Subject) -> str:
    """Many calls at once end as one call alone does."""
    (alone,) = await subject.observe()
    together = await subject.observe(times=CALLS_AT_ONCE)
    others = sorted({item.status.value for item in together if item.status is not alone.status})
    if others:
        other = next(item.text for item in together if item.status is not alone.status)
        raise Broken(f"{alone.status.value} alone, but of {CALLS_AT_ONCE} calls at once some are {others[0]}: {other}")
    if subject.tool.pure and {item.text for item in together} != {alone.text}:
        raise Broken("calls at once give other texts than one alone; guard what they share")
    return f"{CALLS_AT_ONCE} calls"


async def determinism(subject: Subject) -> str:
    """A pure tool gives the same text every time."""
    if not subject.tool.pure:
        raise Skip("it is not marked pure")
    texts = {(await subject.observe())[0].text for _ in range(5)}
    if len(texts) > 1:
        raise Broken(f"it is marked pure and gave {len(texts)} texts to 5 equal calls; drop pure=True")
    return "5 calls"


async def output(subject: Subject) -> str:
    """The result is text of a size that a prompt could hold."""
    (seen,) = await subject.observe()
    if len(seen.text) > MAX_CHARS:
        raise Broken(
            f"a result of more than {MAX_CHARS:,} characters; the model sees a few thousand of it, return less"
        )
    if seen.status is Status.OK and not seen.text.strip():
        return "the result is empty; say so in words"
    return f"{len(seen.text):,} characters"


async def state(subject: Subject) -> str:
    """Objects with state open and close, and no two trajectories share one."""
    if subject.tool.state is None:
        raise Skip("it has no state")
    runner, held = subject.runner(), []
    for _ in range(2):
        async with runner.trajectory() as opened:
            await runner.run([subject.call()], trajectory=opened)
            item = opened.object_of(subject.tool.state)
            held.append(item.value)
            try:
                await item.close_or_raise(subject.timeout_s)
            except Exception as error:  # a user's close may raise anything
                raise Broken(f"its close fails ({type(error).__name__}: {error})") from None
    if held[0] is not None and held[0] is held[1]:
        raise Broken("two trajectories share one object")
    return ""


CHECKS: tuple[Check, ...] = (
    schema,
    settings,
    answers,
    odd_arguments,
    timeout,
    cancel,
    concurrency,
    determinism,
    output,
    state,
)
"""In the order in which they are run."""


def load_subjects(
    source: str,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    timeout_s: float = 10.0,
) -> list[Subject]:
    """The tools of a file as the checks take them.

    Args:
        source: as in ``rltr.tools``.
        settings: as ``rltr.tool_settings``.
        arguments: ``{tool: arguments of a good call}``; for others they are made up from the schema.
        timeout_s: wall seconds that a call may take.

    Raises ConfigError or ToolDefinitionError for a tool that cannot be loaded, ConfigError for arguments of none.
    """
    tools, given = load_tools([source], settings), arguments or {}
    unknown = sorted(set(given) - set(tools))
    if unknown:
        raise ConfigError(f"arguments for '{unknown[0]}'", where=source, fix=f"tools here: {', '.join(tools)}.")
    return [_subject(item, given.get(name), timeout_s) for name, item in tools.items()]


def _subject(tool: Tool, given: Mapping[str, Any] | None, timeout_s: float) -> Subject:
    arguments = example(tool.parameters) if given is None else coerced(tool.parameters, given)
    return Subject(tool, arguments, given is not None, timeout_s)


def examine(subject: Subject, checks: Sequence[Check] = CHECKS) -> Iterable[Finding]:
    """Run the checks on a tool, one finding each; where the good call fails, those behind it say nothing more."""
    useless = False
    for check in checks:
        if useless:
            yield Finding(subject.tool.name, check.__name__, "skipped", "the good call fails")
            continue
        finding = asyncio.run(find(subject, check))
        useless = check is answers and finding.verdict == "failed"
        yield finding


async def find(subject: Subject, check: Check) -> Finding:
    """Run one check."""
    name = subject.tool.name
    try:
        return Finding(name, check.__name__, "ok", await check(subject))
    except Skip as reason:
        return Finding(name, check.__name__, "skipped", str(reason))
    except Broken as problem:
        return Finding(name, check.__name__, "failed", str(problem))
    except RltrError as error:
        return Finding(name, check.__name__, "failed", str(error))


def example(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments made up from a schema: defaults and first choices where there are some, else short values."""
    properties, definitions = parameters.get("properties") or {}, parameters.get("$defs") or {}
    return {name: _example(properties[name], definitions) for name in parameters.get("required") or ()}


def _example(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        return _example(definitions.get(str(schema["$ref"]).rpartition("/")[2], {}), definitions)
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    if schema.get("anyOf"):
        return _example(schema["anyOf"][0], definitions)
    if schema.get("type") == "object":
        return example({**schema, "$defs": definitions})
    lowest = schema.get("minimum", 1)
    return {"integer": lowest, "number": lowest, "boolean": True, "array": [], "null": None}.get(
        str(schema.get("type")), "test"
    )


_ODD_TEXTS = ("x" * 20_000, "\x00\x07\x1b", "\ud800 lone", "</tool_response><|im_end|>", "\u202e\U0001f600 中文", "-1")
_ODD_NUMBERS = (0, -1, 10**18)


def _odd(subject: Subject) -> Iterable[dict[str, Any]]:
    """The good call with one argument replaced by something odd that still fits the schema."""
    parameters = subject.tool.parameters
    given = {name: _example(item, parameters.get("$defs") or {}) for name, item in parameters["properties"].items()}
    for name, value in {**given, **subject.arguments}.items():
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        for odd in _ODD_NUMBERS if plain else _ODD_TEXTS if isinstance(value, str) else ():
            arguments = {**subject.arguments, name: odd}
            if argument_problem(parameters, arguments) is None:
                yield arguments


def _keeping(tool: Tool, raised: list[Exception]) -> Callable[..., Any]:
    """The tool's call, which also notes what it raises: the runner tells a policy no more than the type."""

    def plain(*args: Any, **arguments: Any) -> Any:
        try:
            return tool.call(*args, **arguments)
        except Exception as error:
            raised.append(error)
            raise

    async def later(*args: Any, **arguments: Any) -> Any:
        try:
            return await tool.call(*args, **arguments)
        except Exception as error:
            raised.append(error)
            raise

    return later if tool.is_async else plain


def _cause(subject: Subject, seen: Observation) -> str:
    """What the last call raised, in its own words; the observation's text where it raised nothing."""
    if seen.status is not Status.INFRASTRUCTURE or not subject.raised:
        return seen.text
    error = subject.raised[-1]
    try:
        return f"{type(error).__name__}: {error}".rstrip(".") + "."
    except Exception:  # the message is a user's code too
        return seen.text


def _advice(subject: Subject) -> str:
    if not subject.given:
        return f"If {_short(subject.arguments)} is no good call, give one with --arguments; else correct the tool."
    return "Correct the tool or its settings, or raise BadArguments or ToolFailed if that is an answer."


def _begin(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "...")


def _short(arguments: Mapping[str, Any]) -> str:
    text = ascii(dict(arguments))
    return text if len(text) <= 80 else text[:77] + "..."


class _Beats:
    """How long the tools' event loop stands still, in beats of the loop of the check. ``most``: the longest time."""

    def __init__(self) -> None:
        self.most = self._since = 0

    async def of_ours(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._since += 1
            self.most = max(self.most, self._since)

    async def of_the_tools(self) -> None:
        while True:
            self._since = 0
            await asyncio.sleep(BEAT_S)


async def _until_ended(subject: Subject, started: threading.Event, ended: threading.Event) -> None:
    started.set()
    try:
        await subject.tool.call(**subject.arguments)
    finally:
        ended.set()
