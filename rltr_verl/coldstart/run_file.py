"""``run.json``: what the samples of a folder depend on, so that a later run cannot mix others in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rltr_verl.coldstart.records import Outcome
from rltr_verl.coldstart.store import Folder, read_lines, write_lines
from rltr_verl.config import RltrSettings
from rltr_verl.data.prompt_files import LANGUAGES, load_planner_prompt
from rltr_verl.errors import ConfigError, RltrError

_ENDPOINT = ("model", "style", "temperature", "top_p", "max_tokens", "thinking", "keep_reasoning", "extra_body")
_ROLLOUT = (
    "max_turns",
    "max_parallel_calls",
    "max_observation_tokens",
    "observation_cut",
    "format",
    "thinking",
    "mode",
)
_NONE = "not set"


def depends_on(settings: RltrSettings, tokenizer: Any, schemas: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Everything that changes a sample, by the name under which it is set.

    URLs, limits, prices and timeouts are not among it, nor is n: they may change between runs. What may be long or
    secret stands there as a digest.
    """
    teacher = settings.teacher
    own = ("policy",) if teacher.backend == "scripted" else _ENDPOINT
    return {
        "seed": seed,
        **{f"teacher.{name}": getattr(teacher, name) for name in ("backend", *own, "max_trajectory_tokens")},
        **{f"rollout.{name}": getattr(settings.rollout, name) for name in _ROLLOUT},
        "tools": list(settings.tools),
        "tool_settings": _digest({name: settings.tool_settings[name] for name in sorted(settings.tool_settings)}),
        "the tools' schemas": _digest(dict(schemas)),
        "the chat template": _digest(str(tokenizer.chat_template)),
        "the tokenizer": _digest(sorted(tokenizer.get_vocab().items())),
        **{f"the planner's prompt, {language}": load_planner_prompt(language).version for language in LANGUAGES},
    }


def keep(folder: Folder, wanted: Mapping[str, Any], **facts: Any) -> None:
    """Write ``run.json``, after comparing it with the one that is there, if there are samples that stay.

    ``facts`` are written and not compared. A folder in which everything has failed so far, as with a misspelt model, is
    free to change.

    Raises:
        ConfigError: names every value that differs.
        DiskError: the file cannot be written.
    """
    wanted = json.loads(json.dumps(wanted))
    stays = any(Outcome(line["outcome"]).is_final for line in read_lines(folder.samples))
    if stays and (wrong := list(_differences(_read(folder), wanted))):
        lines = "\n  ".join(["the samples in this folder were made otherwise:", *wrong])
        fix = "go on with the values of the folder, or choose another folder (--dir)."
        raise ConfigError(f"{lines}\n ", where=str(folder.run), fix=fix)
    write_lines(folder.run, [{**facts, "depends_on": wanted}])


def _read(folder: Folder) -> dict[str, Any]:
    """What the samples of the folder depend on."""
    fix = "restore the file, or choose another folder."
    if not folder.run.is_file():
        problem = "there are samples, but no run.json that says how they were made"
        raise ConfigError(problem, where=str(folder.run), fix=fix)
    try:
        found: dict[str, Any] = dict(next(read_lines(folder.run), {})["depends_on"])
    except (RltrError, KeyError, TypeError, ValueError):
        problem = "the file does not say how the samples were made"
        raise ConfigError(problem, where=str(folder.run), fix=fix) from None
    return found


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name, _NONE), now.get(name, _NONE)
        if old != new:
            yield f"{name}: {_short(old)} before, {_short(new)} now{_how(name, old)}"


def _how(name: str, old: Any) -> str:
    """The option that brings the old value back, where there is one."""
    if name == "seed":
        return f" (--seed {old})"
    return "" if " " in name or name == "tool_settings" or old == _NONE else f" (--set '{name}={_yaml(old)}')"


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
