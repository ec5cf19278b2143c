"""The planner's prompt as a text file: the system message, a line ``=====``, and the user message with ``$query``.

The system message says what a planner is. How a call is written is left to the model's chat template, which also lists
the tools. A system message that is empty is left out of the prompt. A dollar sign is written ``$$``.

The prompt of an end-to-end agent is the planner's, but for who writes the answer.

The summarizer's prompt is a file of the same form, whose user message holds ``$record`` between two lines with
``$token``: the query and the calls with their results.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Literal

from rltr_verl.errors import ConfigError
from rltr_verl.judge.prompt_files import PromptPack

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")

_WHERE = "--prompt"
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_KANA_OR_HANGUL = re.compile(r"[\u3040-\u30ff\u1100-\u11ff\uac00-\ud7af]")
_WORD = re.compile(r"[^\W\d_\u2e80-\U0003ffff]+")


@lru_cache
def load_planner_prompt(language: Language = "en") -> PromptPack:
    """The shipped planner prompt in ``language``, named ``planner_en`` or ``planner_zh``."""
    return parse_planner_prompt(*_shipped("planner", language))


@lru_cache
def load_end_to_end_prompt(language: Language = "en") -> PromptPack:
    """The shipped prompt of an agent that also answers, named ``end_to_end_en`` or ``end_to_end_zh``."""
    return parse_planner_prompt(*_shipped("end_to_end", language))


def load_planner_prompt_file(path: str | Path) -> PromptPack:
    """A planner prompt of the user's own; named after the file.

    Raises:
        ConfigError: the file cannot be read, has not exactly two sections, or the user message does not hold ``$query``
            exactly once and no other placeholder.
    """
    return parse_planner_prompt(_read(path), Path(path).stem, str(path))


@lru_cache
def load_summarizer_prompt(language: Language = "en") -> PromptPack:
    """The shipped summarizer prompt in ``language``, named ``summarizer_en`` or ``summarizer_zh``."""
    return parse_summarizer_prompt(*_shipped("summarizer", language))


def load_summarizer_prompt_file(path: str | Path) -> PromptPack:
    """A summarizer prompt of the user's own; named after the file.

    Raises:
        ConfigError: the file cannot be read, has not exactly two sections, or the user message does not hold
            ``$record`` exactly once, with a ``$token`` before and behind it.
    """
    return parse_summarizer_prompt(_read(path), Path(path).stem, str(path))


def parse_summarizer_prompt(text: str, name: str, file: str) -> PromptPack:
    """The prompt that a file's text holds; ``file`` is for messages. Raises as :func:`load_summarizer_prompt_file`."""
    system, user = _sections(text, file, "$record")
    found = _placeholders(user)
    if _placeholders(system) or sorted(set(found)) != ["record", "token"] or not _is_enclosed(found):
        fix = "write $record once, below the line '=====', with a line 'BEGIN $token' before it and 'END $token' after."
        raise ConfigError(f"{file}: found placeholders: {_named(system, user)}", where=_WHERE, fix=fix)
    return PromptPack(name, system.replace("$$", "$"), user)


def _is_enclosed(placeholders: list[str]) -> bool:
    at = placeholders.index("record")
    return placeholders.count("record") == 1 and "token" in placeholders[:at] and "token" in placeholders[at:]


def _shipped(role: str, language: Language) -> tuple[str, str, str]:
    """Text, name and file of a shipped prompt."""
    if language not in LANGUAGES:
        fix = f"languages: {', '.join(LANGUAGES)}."
        raise ConfigError(f"no {role} prompt in language '{language}'", where=_WHERE, fix=fix)
    name = f"{role}_{language}"
    file = resources.files("rltr_verl.data") / "prompts" / f"{name}.txt"
    return file.read_text("utf-8"), name, file.name


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"
        fix = "give a UTF-8 text file, or leave --prompt out for the shipped prompt."
        raise ConfigError(f"the prompt file {path} cannot be read: {why}", where=_WHERE, fix=fix) from None


def _sections(text: str, file: str, placeholder: str) -> tuple[str, str]:
    """The system and the user message of a prompt file."""
    lines = [line.rstrip() for line in text.splitlines()]
    if lines.count("=====") != 1:
        fix = f"write the system message, one line of exactly five '=' signs, and the user message ({placeholder})."
        raise ConfigError(f"{file}: {lines.count('=====')} lines '=====', not one", where=_WHERE, fix=fix)
    ruler = lines.index("=====")
    return "\n".join(lines[:ruler]).strip(), "\n".join(lines[ruler + 1 :]).strip()


def _named(system: str, user: str) -> str:
    return ", ".join(f"${name}" for name in _placeholders(system) + _placeholders(user)) or "none"


def parse_planner_prompt(text: str, name: str, file: str) -> PromptPack:
    """The prompt that a file's text holds; ``file`` is for messages. Raises as :func:`load_planner_prompt_file`."""
    system, user = _sections(text, file, "$query")
    if _placeholders(system) or _placeholders(user) != ["query"]:
        fix = "write $query exactly once, below the line '====='; write '$$' for a dollar sign."
        raise ConfigError(f"{file}: found placeholders: {_named(system, user)}", where=_WHERE, fix=fix)
    return PromptPack(name, system.replace("$$", "$"), user)


def prompt_messages(prompt: PromptPack | None, query: str) -> list[dict[str, str]]:
    """The chat messages of a query; without a prompt the query alone."""
    if prompt is None:
        return [{"role": "user", "content": query}]
    user = {"role": "user", "content": Template(prompt.user).substitute(query=query)}
    return [{"role": "system", "content": prompt.system}, user] if prompt.system else [user]


def _placeholders(text: str) -> list[str]:
    matches = (match for match in Template.pattern.finditer(text) if match["escaped"] is None)
    return [match["named"] or match["braced"] or "" for match in matches]


def language_of(text: str) -> Language:
    """``zh`` if the text has at least as many Chinese characters as words of other scripts, and no kana or Hangul."""
    han = len(_HAN.findall(text))
    if not han or _KANA_OR_HANGUL.search(text):
        return "en"
    return "zh" if han >= len(_WORD.findall(text)) else "en"
