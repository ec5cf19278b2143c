"""``rltr test-tool`` and the pytest plugin: each breach of the contract is found, and a good tool passes."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import typer
from typer.testing import CliRunner

from rltr_verl import tool_contract
from rltr_verl.cli import test_tool as command

GOOD = '''
import asyncio
from typing import Literal
from rltr_verl import tool
from rltr_verl.errors import BadArguments

def positive(digits: int) -> None:
    if digits < 0:
        raise ValueError("digits is negative")

@tool(pure=True, check=positive)
def scale(amount: float, kind: Literal["up", "down"] = "up", *, digits: int = 2) -> str:
    """Scale.

    Args:
        amount: how much.
        kind: where to.
    """
    return f"{amount:.{digits}f} {kind}"

@tool
async def look(place: str) -> str:
    """Look.

    Args:
        place: where.
    """
    if place != "home":
        raise BadArguments("no such place")
    await asyncio.sleep(0.01)
    return "nobody"

@tool
class Pad:
    @tool
    def write(self, text: str) -> str:
        """Write.

        Args:
            text: what.
        """
        return "written"

    async def close(self):
        await asyncio.sleep(0)
'''

BREACHES = {
    "schema": "@tool\ndef a_name_that_is_far_too_long_for_any_model_server_to_take_as_it_is(x: str) -> str:\n    'F.'\n"
    "    return x",
    "settings": "def no():\n    raise OSError('gone')\n@tool(check=no)\ndef f(x: str) -> str:\n    'F.'\n    return x",
    "answers": "@tool\ndef f(x: str) -> str:\n    'F.'\n    return {}[x]",
    "odd_arguments": "@tool\ndef f(x: int) -> str:\n    'F.'\n    return str(1 / x)",
    "timeout": "@tool\nasync def f(x: str) -> str:\n    'F.'\n    time.sleep(5)\n    return x",
    "cancel": "@tool\nasync def f(x: str) -> str:\n    'F.'\n    for _ in range(300):\n        try:\n"
    "            await asyncio.sleep(0.1)\n        except asyncio.CancelledError:\n            pass\n    return x",
    "concurrency": "busy = []\n@tool\ndef f(x: str) -> str:\n    'F.'\n    assert not busy\n    busy.append(1)\n"
    "    time.sleep(1)\n    busy.clear()\n    return x",
    "determinism": "import itertools\nn = itertools.count()\n@tool(pure=True)\ndef f(x: str) -> str:\n    'F.'\n"
    "    return str(next(n))",
    "output": "@tool\ndef f(x: str) -> str:\n    'F.'\n    return 'x' * 2_000_000",
    "state": "@tool\nclass C:\n    @tool\n    def f(self) -> str:\n        'F.'\n        return 'x'\n"
    "    def close(self):\n        raise OSError('gone')",
}


def write(tmp_path, body: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text("import asyncio, time\nfrom rltr_verl import tool\n\n" + textwrap.dedent(body) + "\n")
    return str(path)


def run(*args: str):
    app = typer.Typer()
    app.command()(command.test_tool)
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})


def test_a_good_tool_passes(tmp_path):
    arguments = json.dumps({"look": {"place": "home"}, "scale": {"amount": "2.5"}})
    done = run(write(tmp_path, GOOD), "--arguments", arguments, "--timeout", "30")
    assert done.exit_code == 0, done.output
    assert "failed" not in done.output and done.output.count("skipped") == 10


@pytest.mark.parametrize("check", BREACHES)
def test_each_breach_is_found_by_its_check(tmp_path, check):
    source = write(tmp_path, BREACHES[check])
    (subject,) = tool_contract.load_subjects(source, timeout_s=10)
    (finding,) = tool_contract.examine(subject, [getattr(tool_contract, check)])
    assert finding.verdict == "failed" and finding.detail


def test_arguments_that_have_a_default_are_tried_as_well(tmp_path):
    body = "@tool\ndef f(x: str, n: int = 1) -> str:\n    'F.'\n    return str(1 / n)"
    (subject,) = tool_contract.load_subjects(write(tmp_path, body), arguments={"f": {"x": "y"}})
    (finding,) = tool_contract.examine(subject, [tool_contract.odd_arguments])
    assert finding.verdict == "failed" and "'n': 0" in finding.detail


READS = """@tool
def stock(item: str, *, table: str = "none.csv") -> str:
    'Look up.'
    return open(table).read()"""


@pytest.mark.parametrize(
    ("arguments", "advice"), [({}, "{'item': 'test'} is no good call"), ({"stock": {"item": "lamp"}}, "its settings")]
)
def test_a_good_call_that_fails_is_told_with_its_cause_and_nothing_more_is_tried(tmp_path, arguments, advice):
    (subject,) = tool_contract.load_subjects(write(tmp_path, READS), arguments=arguments)
    findings = {finding.check: finding for finding in tool_contract.examine(subject)}
    assert findings["answers"].verdict == "failed"
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'none.csv'" in findings["answers"].detail
    assert advice in findings["answers"].detail
    behind = [finding for name, finding in findings.items() if name not in ("schema", "settings", "answers")]
    assert behind and {finding.detail for finding in behind} == {"the good call fails"}


def test_the_begin_of_a_good_calls_result_is_shown(tmp_path):
    body = "@tool\ndef f(x: str) -> str:\n    'F.'\n    return '[b]' + 'x' * 100"
    (subject,) = tool_contract.load_subjects(write(tmp_path, body))
    (finding,) = tool_contract.examine(subject, [tool_contract.answers])
    assert finding.detail == f"gave '[b]{'x' * 54}...'"
    assert "[b]xxx" in run(write(tmp_path, body)).output


def test_a_breach_ends_with_1_and_is_named(tmp_path):
    done = run(write(tmp_path, BREACHES["odd_arguments"]))
    assert done.exit_code == 1
    assert "odd_arguments" in done.output and "ZeroDivisionError" in done.output


@pytest.mark.parametrize(
    ("body", "options", "code", "message"),
    [
        ("@tool\ndef f(x) -> str:\n    'F.'", [], 1, "no type for 'x'"),
        ("x = 1", [], 2, "defines no tool"),
        ("@tool\ndef f(x: str) -> str:\n    'F.'", ["--arguments", "{"], 2, "--arguments: not JSON"),
        ("@tool\ndef f(x: str) -> str:\n    'F.'", ["--arguments", '{"g": {}}'], 2, "arguments for 'g'"),
        ("@tool\ndef f(x: str, *, n: int) -> str:\n    'F.'", [], 2, "setting 'n' is missing"),
    ],
)
def test_what_cannot_be_tested_is_one_clear_error(tmp_path, body, options, code, message):
    done = run(write(tmp_path, body), *options)
    assert done.exit_code == code
    assert message in " ".join(done.output.replace("│", " ").split())


def pytest_run(tmp_path, body: str, ini: str = "") -> str:
    (tmp_path / "pytest.ini").write_text("[pytest]\n" + ini)
    args = [
        "-q",
        "-rs",
        "-p",
        "rltr_verl.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "--rltr-tool",
        write(tmp_path, body),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *args], capture_output=True, text=True, timeout=500, cwd=tmp_path
    )
    return f"{done.returncode} {done.stdout}{done.stderr}"


def test_the_pytest_plugin_has_a_test_for_every_check(tmp_path):
    ini = 'rltr_tool_arguments = {"look": {"place": "home"}}\nrltr_tool_settings = {"scale": {"digits": 1}}\n'
    output = pytest_run(tmp_path, GOOD, ini)
    assert output.startswith("0 ") and "20 passed, 10 skipped" in output


def test_the_pytest_plugin_fails_where_the_contract_is_broken(tmp_path):
    output = pytest_run(tmp_path, BREACHES["answers"])
    assert output.startswith("1 ") and "f[answers]" in output and "KeyError" in output
