"""The part of the preflight that reads the data files: every row, before Ray starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from rltr_verl.config import RltrSettings
from rltr_verl.errors import DataError
from rltr_verl.rows import read_messages, stored_rows

if TYPE_CHECKING:
    from rltr_verl.rollout.turns import Planner

_SHOWN = 40
"""Characters of a query that a message repeats, so that its row is found again."""


def check_data(config: DictConfig, settings: RltrSettings, planner: Planner, positions: int | None = None) -> None:
    """Every row of the data files has known tools, a prompt that fits and, for the checklist judge, readable needs.

    Args:
        config: the run's.
        settings: its node ``rltr``.
        planner: what the rollout will use.
        positions: how many tokens the model can hold, prompt and response together; None if it does not say.

    Raises:
        DataError: for the first row with a fault; names the file and the row, counted from 1.
    """
    check = _RowCheck(config, settings, planner, positions)
    for key in ("train_files", "val_files"):
        for file in _as_list(config.data.get(key)):
            _check_file(str(file), f"data.{key}", check)


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _check_file(file: str, where: str, check: _RowCheck) -> None:
    path = Path(file).expanduser()
    if not path.is_file():
        fix = "check the path; `rltr data` makes the file from your queries."
        raise DataError(f"no file '{file}'", where=where, fix=fix)
    number = 0
    for number, row in enumerate(stored_rows(path), 1):
        check(row, f"{file}, row {number}{_known_as(row)}")
    if number == 0:
        raise DataError("the file holds no rows", where=file, fix="write at least one query.")


def _known_as(row: Mapping[str, Any]) -> str:
    """The number that the row had in the user's own file, and how its query begins."""
    info = row.get("extra_info")
    found = info if isinstance(info, Mapping) else {}
    index, query = found.get("index"), found.get("query") or _last_text(row.get("prompt"))
    told = [f"index {index}"] if index is not None else []
    words = " ".join(str(query or "").split())
    told += [repr(words if len(words) <= _SHOWN else words[:_SHOWN] + "...")] if words else []
    return f" ({', '.join(told)})" if told else ""


def _last_text(prompt: Any) -> Any:
    """Content of the prompt's last message, if it is in form."""
    messages = prompt if isinstance(prompt, list) else []
    return messages[-1].get("content") if messages and isinstance(messages[-1], Mapping) else None


@dataclass(frozen=True)
class _RowCheck:
    """Checks one row: prompt, agent, needs, tools, length."""

    config: DictConfig
    settings: RltrSettings
    planner: Planner
    positions: int | None

    def __call__(self, row: Mapping[str, Any], where: str) -> None:
        """Raises DataError for the row's first fault."""
        prompt = _prompt(row, where, self.config.data.get("prompt_key", "prompt"))
        agent = row.get("agent_name")
        if agent is not None and not str(agent).startswith("rltr_"):
            fix = "set agent_name to rltr_planner or drop the column."
            raise DataError(f"agent_name '{agent}' is not a loop of this package", where=where, fix=fix)
        if self.settings.judge.backend == "checklist":
            _check_needs(row, where)
        shown = list(_shown(row, where, self.planner).values())
        self._check_length(len(self.planner.template.prompt_ids(prompt, shown)), where)

    def _check_length(self, length: int, where: str) -> None:
        limit, response = int(self.config.data.max_prompt_length), int(self.config.data.max_response_length)
        if length <= limit:
            return
        problem = f"the prompt has {length} tokens, data.max_prompt_length is {limit}"
        if self.positions is None or length + response <= self.positions:
            bound = "" if self.positions is None else f" (with the response at most {self.positions}, the model's own)"
            fix = f"raise data.max_prompt_length{bound}, shorten the tools' descriptions, or drop the row."
        else:
            problem += f", and with data.max_response_length={response} it exceeds the model's {self.positions}"
            fix = "take a model with a longer context, shorten the prompt or the tools' descriptions, or drop the row."
        raise DataError(problem, where=where, fix=fix)


def _shown(row: Mapping[str, Any], where: str, planner: Planner) -> dict[str, dict[str, Any]]:
    """The tools of the row, as the rollout will show them."""
    try:
        return planner.shown(row.get("extra_info"))
    except DataError as error:
        raise DataError(error.problem, where=where, fix=error.fix) from None


def _check_needs(row: Mapping[str, Any], where: str) -> None:
    from rltr_verl.judge.checklist import parse_needs

    if parse_needs((row.get("extra_info") or {}).get("needs"), where) is None:
        fix = (
            "write the query's needs ([] if it needs no tool) and let `rltr data` make the file, "
            "or use an LLM checker: judge=endpoint."
        )
        raise DataError("no 'extra_info.needs', which the checklist judge compares with", where=where, fix=fix)


def _prompt(row: Mapping[str, Any], where: str, key: str) -> list[dict[str, Any]]:
    prompt = row.get(key)
    if prompt is None:
        known = ", ".join(sorted(map(str, row))) or "none"
        fix = f"add a column '{key}' of chat messages (columns here: {known}); `rltr data` makes it from your queries."
        raise DataError(f"no '{key}'", where=where, fix=fix)
    valid = isinstance(prompt, Iterable) and not isinstance(prompt, (str, bytes)) and len(list(prompt)) > 0
    if not valid or not all(isinstance(message, Mapping) and message.get("content") for message in prompt):
        fix = 'write [{"role": "user", "content": "..."}].'
        raise DataError(f"'{key}' is not a list of chat messages with content", where=where, fix=fix)
    return read_messages(prompt)
