"""``rltr test-tool``: does a tool hold to the contract?"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rltr_verl.cli._errors import reports_errors
from rltr_verl.errors import ConfigError, ToolDefinitionError
from rltr_verl.tool_contract import Finding, examine, load_subjects

_STYLES = {"ok": "green", "failed": "bold red", "skipped": "dim"}


@reports_errors
def test_tool(
    source: Annotated[str, typer.Argument(help="A file with tools, or a name as in rltr.tools.")],
    settings: Annotated[str, typer.Option(help="JSON: settings per tool, as rltr.tool_settings.")] = "{}",
    arguments: Annotated[str, typer.Option(help="JSON: arguments of a good call per tool.")] = "{}",
    timeout: Annotated[float, typer.Option(help="Wall seconds that a call may take.", min=0.01)] = 10.0,
) -> None:
    """Check that tools can do no harm to a rollout: schema, timeout, cancelling, concurrency, output and more.

    Ends with status 1 if a check fails, with 2 if the tools or options cannot be read, else with 0.
    """
    given = _per_tool(settings, "--settings"), _per_tool(arguments, "--arguments")
    with _quiet():
        findings = _examine(source, given, timeout)
    _print(findings)
    raise typer.Exit(int(any(finding.verdict == "failed" for finding in findings)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without log lines: the table says what fails."""
    logger = logging.getLogger("rltr_verl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _examine(source: str, given: tuple[Mapping[str, Any], Mapping[str, Any]], timeout: float) -> list[Finding]:
    try:
        subjects = load_subjects(source, *given, timeout_s=timeout)
        return [finding for subject in subjects for finding in examine(subject)]
    except ToolDefinitionError as error:
        return [Finding("-", "definition", "failed", str(error))]


def _per_tool(text: str, option: str) -> Mapping[str, Mapping[str, Any]]:
    fix = 'give a JSON object, for example {"convert": {"amount": 1}}.'
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"not JSON ({error})", where=option, fix=fix) from None
    if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
        raise ConfigError("not an object of objects", where=option, fix=fix)
    return value


def _print(findings: list[Finding]) -> None:
    table = Table("tool", "check", "", "")
    for finding in findings:
        style = _STYLES[finding.verdict]
        table.add_row(finding.tool, finding.check, f"[{style}]{finding.verdict}[/]", escape(finding.detail))
    Console().print(table)
