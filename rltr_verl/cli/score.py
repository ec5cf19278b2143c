"""``rltr score``: score stored trajectories, without verl and without a GPU."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rltr_verl.cli._errors import reports_errors
from rltr_verl.config import RltrSettings, load_settings
from rltr_verl.errors import ConfigError, DataError
from rltr_verl.judge.checklist import parse_needs
from rltr_verl.scoring import ScoredTrajectory, Scorer
from rltr_verl.trajectory import Trajectory

_WINDOW = 64
"""Trajectories scored at once; the judge's own limit bounds the requests."""

_FORM = '{"id": ..., "query": ..., "tools": [...], "messages": [...]}'
_DUMPED = "trajectory"
"""Field of a line of ``rltr.dump_dir``, which stands for the messages."""


@dataclass(frozen=True)
class _Row:
    """One line of the input: its data and the trajectory read from its messages, or from a dump's ``trajectory``."""

    id: Any
    data: dict[str, Any]
    trajectory: Trajectory


@reports_errors
def score(
    rows: Annotated[Path, typer.Argument(help="JSON lines: " + _FORM + ' and, for the checklist, "needs"; or a dump.')],
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the node rltr, e.g. reward.terms.repeat.lambda=0.3"
        ),
    ] = None,
) -> None:
    """Print one JSON line per stored trajectory: format, repeats, errors, completeness, votes, total (null = unscored).

    All rows are checked before the first is scored. Completeness comes from the rows' needs, or from a judge:
    --set judge.backend=endpoint --set judge.base_url=http://host:8000/v1 --set judge.model=NAME
    """
    settings = _settings(changes or [])
    loaded = list(_read(rows, settings))
    unscored = asyncio.run(_score_all(loaded, settings, typer.echo))
    if unscored:
        row, reason = unscored[0]
        count = f"{len(unscored)} of {len(loaded)} rows are unscored (total null)"
        typer.secho(f"{count}. The first, id {row!r}: {reason}", fg=typer.colors.YELLOW, err=True)


def _settings(changes: list[str]) -> RltrSettings:
    """Defaults of the node ``rltr`` with the changes of ``--set`` applied."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for change in changes:
        if "=" not in change:
            raise ConfigError(f"'{change}' sets nothing", where="--set", fix="write key=value.")
    try:
        node = OmegaConf.to_container(OmegaConf.from_dotlist(changes), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error), where="--set", fix="write key=value, value in YAML.") from None
    assert isinstance(node, dict)
    return load_settings(_with_default_terms(node.get("rltr", node)))


def _with_default_terms(node: dict[str, Any]) -> dict[str, Any]:
    """Changing one term keeps the others, as it does in a recipe."""
    reward = dict(node.get("reward") or {})
    defaults: dict[str, Any] = {name: {} for name in load_settings(None).reward.terms}
    return {**node, "reward": {**reward, "terms": defaults | dict(reward.get("terms") or {})}}


def _read(path: Path, settings: RltrSettings) -> Iterator[_Row]:
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise DataError("no such file", where=str(path), fix="check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read ({error})", where=str(path), fix="give a UTF-8 file of JSON lines.") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _row(line, number, f"{path}, row {number}", settings)


def _row(line: str, number: int, where: str, settings: RltrSettings) -> _Row:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON ({error})", where=where, fix=f"write {_FORM} on one line.") from None
    if not isinstance(data, dict):
        raise DataError("a row must be a JSON object", where=where, fix=f"write {_FORM}.")
    parse_needs(data.get("needs"), where)
    if _DUMPED in data and "messages" not in data:
        return _Row(data.get("id", number), data, _dumped(data[_DUMPED], where))
    _check_field(data, "messages", list, where, "write the conversation as a list of {role, content}.")
    _check_field(data, "tools", (list, type(None)), where, "write a list of OpenAI tool schemas, or leave it out.")
    _check_field(data, "query", (str, type(None)), where, "write the user's query as text.")
    return _Row(data.get("id", number), data, _trajectory(data, where, settings))


def _dumped(value: Any, where: str) -> Trajectory:
    try:
        return Trajectory.from_dict(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"field '{_DUMPED}' is not a trajectory of a dump ({type(error).__name__}: {error})"
        raise DataError(problem, where=where, fix=f"give lines of rltr.dump_dir as they are, or {_FORM}.") from None


def _check_field(data: dict[str, Any], name: str, kind: Any, where: str, fix: str) -> None:
    if name not in data and not isinstance(None, kind):
        raise DataError(f"field '{name}' is missing", where=where, fix=fix)
    if not isinstance(data.get(name), kind):
        given = type(data[name]).__name__
        raise DataError(f"field '{name}' has the wrong type ({given})", where=where, fix=fix)


def _trajectory(data: dict[str, Any], where: str, settings: RltrSettings) -> Trajectory:
    tools = data.get("tools") or []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise DataError(f"field 'tools[{index}]' must be an object", where=where, fix="give OpenAI tool schemas.")
    thinking = settings.rollout.thinking
    try:
        return Trajectory.from_messages(data["messages"], data.get("query"), tools=tools, prefilled_think=thinking)
    except DataError as error:
        raise DataError(error.problem, where=f"{where}, {error.where}", fix=error.fix) from None


async def _score_all(rows: list[_Row], settings: RltrSettings, write: Callable[[str], Any]) -> list[tuple[Any, str]]:
    """Score in the order of the rows, a window at a time; each window is written before the next starts.

    Returns:
        Id and reason of each unscored row.
    """
    scorer = Scorer(settings)
    unscored: list[tuple[Any, str]] = []
    try:
        for start in range(0, len(rows), _WINDOW):
            window = rows[start : start + _WINDOW]
            scored = await asyncio.gather(*(scorer.score(row.trajectory, row.data) for row in window))
            for row, result in zip(window, scored, strict=True):
                write(json.dumps(_line(row, result)))
                if result.unscored:
                    unscored.append((row.id, result.unscored))
            sys.stdout.flush()
    finally:
        await scorer.close()
    return unscored


def _line(row: _Row, scored: ScoredTrajectory) -> dict[str, Any]:
    completeness = scored.results.get("completeness")
    return {
        "id": row.id,
        "format_ok": not scored.faults,
        "format_reason": ", ".join(scored.faults) or None,
        "n_calls": row.trajectory.n_calls,
        "repeats": _count(scored, "repeats"),
        "errors": _count(scored, "errors"),
        "completeness": completeness.value if completeness else None,
        "votes": completeness.record["votes"] if completeness else [],
        "total": scored.total,
    }


def _count(scored: ScoredTrajectory, name: str) -> int | None:
    """A term's count, or None where the term is off."""
    return int(scored.metrics[name]) if name in scored.metrics else None
