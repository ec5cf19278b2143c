"""pytest plugin: ``pytest --rltr-tool my_tools.py`` runs the contract checks of :mod:`rltr_verl.tool_contract`.

One test a tool and check. Settings and arguments of a good call stand in ``pytest.ini`` or ``pyproject.toml`` as JSON:
``rltr_tool_settings``, ``rltr_tool_arguments``.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--rltr-tool`` and its settings."""
    help_text = "file with tools of rltr_verl, or a name as in rltr.tools; its contract is tested"
    parser.getgroup("rltr").addoption("--rltr-tool", action="append", default=[], metavar="FILE", help=help_text)
    parser.addini("rltr_tool_settings", "JSON: settings per tool, as rltr.tool_settings", default="{}")
    parser.addini("rltr_tool_arguments", "JSON: arguments of a good call per tool", default="{}")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for every check of every tool named on the command line."""
    for source in config.getoption("--rltr-tool"):
        items += ContractFile.from_parent(session, path=Path(source), source=source).collect()


class ContractFile(pytest.File):
    """The tests of one file with tools."""

    def __init__(self, *, source: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._source = source

    def collect(self) -> Iterator[ContractItem]:
        """One item a tool and check."""
        from rltr_verl.errors import RltrError
        from rltr_verl.tool_contract import CHECKS, load_subjects

        given = (json.loads(self.config.getini(f"rltr_tool_{name}")) for name in ("settings", "arguments"))
        try:
            subjects = load_subjects(self._source, *given)
        except RltrError as error:
            raise pytest.UsageError(str(error)) from None
        for subject in subjects:
            for check in CHECKS:
                name = f"{subject.tool.name}[{check.__name__}]"
                yield ContractItem.from_parent(self, name=name, subject=subject, check=check)


class ContractItem(pytest.Item):
    """One check of one tool."""

    def __init__(self, *, subject: Any, check: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._subject, self._check = subject, check

    def runtest(self) -> None:
        """Fail or skip as the check does."""
        from rltr_verl.tool_contract import find

        finding = asyncio.run(find(self._subject, self._check))
        if finding.verdict == "skipped":
            pytest.skip(finding.detail)
        if finding.verdict == "failed":
            pytest.fail(finding.detail, pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where the test is and what it is called."""
        return self.path, None, self.name


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Let go of what the checks left behind now. Its last words would else come while some plugin is being imported,
    and CPython 3.11 cannot format a traceback in the middle of parsing a file."""
    gc.collect()
