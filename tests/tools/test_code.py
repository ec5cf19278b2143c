"""The code tool with real processes, and with a server that answers as SandboxFusion does."""

from __future__ import annotations

import logging
import sys

import psutil
import pytest
from aiohttp import web

from rltr_verl.errors import BadArguments, ConfigError
from rltr_verl.sandbox import PLANS
from rltr_verl.tool_runner import ToolRunner
from rltr_verl.tooling import check_tools, load_tools
from rltr_verl.tools import code as module
from rltr_verl.tools.code import code
from rltr_verl.trajectory import Status, ToolCall
from tests.fakes.processes import gone, unique, zombies


async def test_a_child_left_behind_is_gone_t01a():
    mark = unique(600.0)
    assert await code(f"import subprocess;subprocess.Popen(['sleep','{mark}']);print('x')") == "x"
    assert gone(mark)


async def test_a_child_in_a_session_of_its_own_is_gone_t01b():
    limit = unique(100.0)
    program = "import os\nif os.fork()==0:\n    os.setsid()\n    import time;time.sleep(600)\nprint('p')"
    assert await code(program, timeout_s=limit) == "p"
    assert gone(limit) and zombies() == []


@pytest.mark.parametrize("program", ["while True: pass", "sum(range(10**12))"])
async def test_an_endless_program_is_stopped_and_takes_no_more_time_t02(program):
    limit = unique(1.0)
    assert await code(program, timeout_s=limit, cpu_s=60) == f"[stopped: no end within {limit:g} s]"
    assert gone(limit, within=0.0)


async def test_no_key_of_the_trainer_is_seen_t04a(monkeypatch):
    monkeypatch.setenv("CANARY_JUDGE_KEY", "canary-123")
    assert await code("import os;print(os.environ.get('CANARY_JUDGE_KEY'))") == "None"


async def test_nor_in_proc_t04b(monkeypatch):
    monkeypatch.setenv("CANARY_JUDGE_KEY", "canary-123")
    program = """
import glob
for path in glob.glob('/proc/*/environ'):
    try: print(open(path).read())
    except OSError: pass
"""
    if module.best_plan().name == "none":
        pytest.skip("the weakest plan hides only the program's own environment")
    assert "canary" not in await code(program)
    assert "canary" not in await code("print(open('/proc/self/environ').read()[:50])")


async def test_a_huge_line_is_bounded_t06a():
    before = psutil.Process().memory_info().rss
    text = await code("print('x'*10**8)", timeout_s=60, output_chars=1000)
    assert len(text) < 1100 and "[... 99999001 bytes left out ...]" in text
    assert psutil.Process().memory_info().rss - before < 50 << 20


async def test_endless_output_keeps_head_and_tail_t06b():
    text = await code("n = 0\nwhile True:\n    print(n)\n    n += 1", timeout_s=4.0, cpu_s=60, output_chars=1000)
    lines = text.splitlines()
    assert lines[:3] == ["0", "1", "2"] and lines[-1] == "[stopped: no end within 4 s]"
    assert int(lines[-3]) > 1000 and "bytes left out" in text


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("1+1", "2"),
        ("x=1", "(no output)"),
        ("", "(no output)"),
        ("# nothing", "(no output)"),
        ("None", "(no output)"),
        ("print('a')\n'b'", "a\n'b'"),
        ("x = [1]\nx.append(2)\nx", "[1, 2]"),
        ("def f():\n    'doc'\n    return 1\nf()", "1"),
        ("import sys; print('e', file=sys.stderr)", "e"),
        ("if __name__ == '__main__': print('main')", "main"),
        ("from __future__ import annotations\nclass A:\n    x: Unknown\nA.__annotations__", "{'x': 'Unknown'}"),
        ("import sys; sys.exit(0)", "(no output)"),
        ("print('中文 é 😀')", "中文 é 😀"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)"),
        ("import inspect\ndef f(): return 1\nprint(inspect.getsource(f), end='')", "def f(): return 1"),
    ],
)
async def test_what_the_model_reads_t07(program, text):
    assert await code(program) == text


async def test_the_path_does_not_matter_t11a(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    assert await code("print(1)") == "1"


async def test_a_slow_end_does_not_hold_the_call_and_nothing_is_shared_t12a():
    limit = unique(1.0)
    program = "import time\nclass A:\n    def __del__(self, sleep=time.sleep):\n        sleep(30)\na=A()"
    assert await code(program, timeout_s=limit) == f"[stopped: no end within {limit:g} s]"
    assert gone(limit)
    with pytest.raises(BadArguments, match="NameError"):
        await code("a")


@pytest.mark.parametrize(
    ("program", "settings", "said"),
    [
        ("1/0", {}, "ZeroDivisionError: division by zero\n[exit code 1]"),
        ("print(1", {}, "SyntaxError"),
        ("import sys; print('a'); sys.exit('why')", {}, "a\nwhy\n[exit code 1]"),
        ("import os; os._exit(127)", {}, "[exit code 127]"),
        ("import os; os.kill(os.getpid(), 11)", {}, "[killed by SIGSEGV]"),
        ("import os; os.kill(os.getpid(), 40)", {}, "[killed by signal 40]"),
        ("while True: pass", {"cpu_s": 1.0, "timeout_s": 60.0}, "[stopped: more than 1 s of CPU time]"),
        ("x = bytearray(10**9)", {"memory_mb": 200}, "MemoryError"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", {}, "Error: [Errno 1"),
        ("input()", {}, "EOFError"),
    ],
)
async def test_a_program_that_fails_is_the_model_s_mistake_unless_set_otherwise(program, settings, said):
    with pytest.raises(BadArguments) as caught:
        await code(program, **settings)
    assert said in str(caught.value)
    assert said in await code(program, failed_program="ok", **settings)


async def test_statuses_in_a_rollout(monkeypatch):
    async def status(program, timeout_s=60):
        runner = ToolRunner(load_tools(["code"], {"code": {"timeout_s": timeout_s}}), timeout_s=120)
        return (await runner.run([ToolCall("code", {"code": program}, "")]))[0].status

    assert await status("1") is Status.OK
    assert await status("1/0") is Status.BAD_ARGUMENTS
    assert await status("import time; time.sleep(600)", timeout_s=1) is Status.OK
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert await status("1") is Status.INFRASTRUCTURE


async def test_the_runner_s_own_limit_kills_the_program():
    limit = unique(60.0)
    runner = ToolRunner(load_tools(["code"], {"code": {"timeout_s": limit}}), timeout_s=1.0)
    observations = await runner.run([ToolCall("code", {"code": "import time; time.sleep(60)"}, "")])
    assert observations[0].status is Status.TIMEOUT
    assert gone(limit)


def test_the_log_says_at_start_what_holds(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    check_tools(load_tools(["code"]))
    assert "code: plan" in caplog.text and "limits of time" in caplog.text
    monkeypatch.setattr(module, "best_plan", lambda: PLANS[-1])
    check_tools(load_tools(["code"]))
    assert "the network" in caplog.text
    with pytest.raises(ConfigError, match="cannot be isolated"):
        check_tools(load_tools(["code"], {"code": {"isolation": "full"}}))


def test_a_limit_of_nothing_is_refused_at_start():
    with pytest.raises(ConfigError, match="memory_mb"):
        check_tools(load_tools(["code"], {"code": {"memory_mb": 0}}))


def test_its_limit_of_time_is_known_to_the_runner():
    loaded = load_tools(["code"], {"code": {"timeout_s": 7}})["code"]
    assert (loaded.bound_s, loaded.at_once) == (7, 256)


def test_the_model_sees_one_argument():
    parameters = load_tools(["code"])["code"].parameters
    assert list(parameters["properties"]) == ["code"]


class Fusion:
    """Answers POST /run_code with the bodies given, and keeps what it was asked."""

    def __init__(self, *bodies, status=200):
        self._bodies, self._status, self.asked = list(bodies), status, []

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/run_code", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _answer(self, request):
        self.asked.append(await request.json())
        body = self._bodies[min(len(self.asked), len(self._bodies)) - 1]
        if isinstance(body, str):
            return web.Response(text=body, status=self._status)
        return web.json_response(body, status=self._status)


def fusion(status="Success", message="", **result):
    return {"status": status, "message": message, "compile_result": None, "run_result": result or None, "files": {}}


async def test_fusion_runs_the_program():
    async with Fusion(fusion(status="Success", return_code=0, stdout="3\n", stderr="")) as server:
        assert await code("print(3)\ud800", url=server.url, timeout_s=7) == "3"
    assert server.asked[0] == {
        "code": "print(3)?",
        "language": "python",
        "run_timeout": 7,
        "memory_limit_MB": 1024,
    }


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (fusion(return_code=0, stdout="", stderr=""), "(no output)"),
        (fusion(return_code=0, stdout=None, stderr=None), "(no output)"),
        (fusion(return_code=0, stdout="a\n", stderr="b\n"), "a\nb"),
        (
            fusion(return_code=0, stdout="x" * 5000, stderr=""),
            "x" * 50 + "\n[... 4900 characters left out ...]\n" + "x" * 50,
        ),
    ],
)
async def test_fusion_output(body, text):
    async with Fusion(body) as server:
        assert await code("1", url=server.url, output_chars=100) == text


async def test_fusion_reports_a_failed_program():
    bodies = (
        fusion("Failed", return_code=1, stdout="before\n", stderr="ZeroDivisionError\n"),
        fusion("Failed", return_code=None, stdout="before\n", stderr=None),
    )
    async with Fusion(*bodies) as server:
        with pytest.raises(BadArguments) as caught:
            await code("1/0", url=server.url)
        assert str(caught.value) == "before\nZeroDivisionError\n[exit code 1]"
        assert await code("1/0", url=server.url, failed_program="ok") == "before\n[failed]"


async def test_fusion_time_limit_is_a_result():
    result = {"return_code": None, "stdout": "a\n", "stderr": ""}
    body = {**fusion("Failed"), "run_result": {"status": "TimeLimitExceeded", **result}}
    async with Fusion(body) as server:
        assert await code("while True: pass", url=server.url, timeout_s=2) == "a\n[stopped: no end within 2 s]"


@pytest.mark.parametrize(
    ("body", "http"),
    [
        (fusion("SandboxError", message="no runner"), 200),
        (fusion("Success"), 200),
        ([], 200),
        ("not json", 200),
        ("busy", 500),
    ],
)
async def test_a_fault_of_fusion_is_never_the_model_s(body, http):
    async with Fusion(body, status=http) as server:
        runner = ToolRunner(load_tools(["code"], {"code": {"url": server.url}}), timeout_s=60)
        observations = await runner.run([ToolCall("code", {"code": "1"}, "")])
    assert observations[0].status is Status.INFRASTRUCTURE


async def test_no_server_is_a_fault_too():
    runner = ToolRunner(load_tools(["code"], {"code": {"url": "http://127.0.0.1:9"}}), timeout_s=60)
    observations = await runner.run([ToolCall("code", {"code": "1"}, "")])
    assert observations[0].status is Status.INFRASTRUCTURE
