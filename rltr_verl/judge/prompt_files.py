"""Judge prompts as text files.

A file holds the system message, a line ``=====``, and the user message. Placeholders are written ``$name`` (a dollar
sign is written ``$$``) and stand in the user message only. What comes from the policy, from tools or from data stands
between the first and the last ``$token``:

=============  ===============================  ===========================
job            between the tokens               elsewhere
=============  ===============================  ===========================
completeness   ``$record``                      ``$tools``; may: ``$calls``, ``$failed``, ``$cut``
correctness    ``$query $reference $answer``
helpfulness    ``$query $answer``
relevance      ``$query $answer``
=============  ===============================  ===========================

Every job asks for 0 or 1, as the paper does for completeness and correctness; its scales of helpfulness and relevance
are not known, so 0 or 1 there is ours.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from string import Template

from rltr_verl.errors import ConfigError

LANGUAGES = ("en", "zh")
_WHERE = "rltr.judge.prompt"
_SPLIT = "\n=====\n"
_DATA = {
    "completeness": ("record",),
    "correctness": ("query", "reference", "answer"),
    "helpfulness": ("query", "answer"),
    "relevance": ("query", "answer"),
}
_FREE = {"completeness": ("tools",)}
_OPTIONAL = {"completeness": ("calls", "failed", "cut")}
JOBS = tuple(_DATA)


@dataclass(frozen=True)
class PromptPack:
    """A judge prompt: its name, the system message and the user message with placeholders."""

    name: str
    system: str
    user: str

    @property
    def version(self) -> str:
        """``name@`` and the first 12 digits of the SHA-256 of both messages; changes with every change of wording."""
        return f"{self.name}@{hashlib.sha256((self.system + _SPLIT + self.user).encode()).hexdigest()[:12]}"


@lru_cache
def load_prompt(job: str, language: str = "en") -> PromptPack:
    """The shipped prompt for a job of :data:`JOBS` in a language of :data:`LANGUAGES`.

    Raises ConfigError for a job or language that is not shipped.
    """
    if job not in JOBS or language not in LANGUAGES:
        fix = f"jobs: {', '.join(JOBS)}; languages: {', '.join(LANGUAGES)}."
        raise ConfigError(f"no prompt for job '{job}' in language '{language}'", where=_WHERE, fix=fix)
    name = f"{job}_{language}"
    file = resources.files("rltr_verl.judge") / "prompts" / f"{name}.txt"
    return parse_prompt(file.read_text("utf-8"), name, job, f"{name}.txt")


def load_prompt_file(path: str | Path, job: str = "completeness") -> PromptPack:
    """A prompt of the user's own; named after the file.

    Raises:
        ConfigError: the file cannot be read, has not exactly two sections, or its placeholders are not those of the
            job; names the file, the line and the fix.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"
        fix = "give the path of a UTF-8 text file, or null for the shipped prompt."
        raise ConfigError(f"the prompt file {path} cannot be read: {why}", where=_WHERE, fix=fix) from None
    return parse_prompt(text, Path(path).stem, job, str(path))


def parse_prompt(text: str, name: str, job: str, file: str) -> PromptPack:
    """The prompt that a file's text holds; ``file`` is for messages. Raises as :func:`load_prompt_file` does."""
    lines = [line.rstrip() for line in text.splitlines()]
    rulers = [number for number, line in enumerate(lines) if line == "====="]
    if len(rulers) != 1:
        fix = "write the system message, one line of exactly five '=' signs, and the user message."
        line = rulers[1] + 1 if rulers else max(1, len(lines))
        raise _wrong(file, line, f"{len(rulers)} lines '=====', not one", fix)
    system, user = "\n".join(lines[: rulers[0]]), "\n".join(lines[rulers[0] + 1 :])
    for part, number, what in ((system, 1, "system"), (user, rulers[0] + 2, "user")):
        if not part.strip():
            raise _wrong(file, number, f"the {what} message is empty", "write both messages.")
    _check_system(system, file)
    _check_user(user, job, file, rulers[0] + 2)
    return PromptPack(name, system.replace("$$", "$").strip(), user.strip())


def _placeholders(text: str, file: str, first_line: int) -> Iterator[tuple[str, int, int]]:
    """Name, line and position of each placeholder; raises for a dollar sign that is none."""
    for match in Template.pattern.finditer(text):
        line = first_line + text.count("\n", 0, match.start())
        if match["invalid"] is not None:
            raise _wrong(file, line, "a '$' that starts no placeholder", "write '$$' for a dollar sign.")
        name = match["named"] or match["braced"]
        if name:
            yield name, line, match.start()


def _check_system(system: str, file: str) -> None:
    for name, line, _ in _placeholders(system, file, 1):
        fix = "move it into the user message, below the line '====='; write '$$' for a dollar sign."
        raise _wrong(file, line, f"placeholder ${name} in the system message", fix)


def _check_user(user: str, job: str, file: str, first_line: int) -> None:
    found = list(_placeholders(user, file, first_line))
    data, needed = _DATA[job], (*_DATA[job], *_FREE.get(job, ()), "token")
    known = (*needed, *_OPTIONAL.get(job, ()))
    for name, line, _ in found:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean ${close[0]}?" if close else f"known: {', '.join('$' + item for item in known)}."
            raise _wrong(file, line, f"unknown placeholder ${name}", fix)
    missing = [name for name in needed if name not in {name for name, _, _ in found}]
    if missing:
        raise _wrong(file, first_line, f"the user message lacks ${missing[0]}", f"a prompt for {job} must show it.")
    tokens = [position for name, _, position in found if name == "token"]
    for name, line, position in found:
        if name in data and not tokens[0] < position < tokens[-1]:
            fix = "put a line 'BEGIN $token' before it and a line 'END $token' after it."
            raise _wrong(file, line, f"${name} does not stand between two lines with $token", fix)


def _wrong(file: str, line: int, problem: str, fix: str) -> ConfigError:
    return ConfigError(f"{file}, line {line}: {problem}", where=_WHERE, fix=fix)
