"""Programs that try to get out, or to stay, under every plan that this machine allows."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from rltr_verl.errors import ConfigError
from rltr_verl.sandbox import PLANS, Limits, best_plan, host, run_python
from tests.fakes.processes import gone, living, unique, zombies

BY_NAME = {plan.name: plan for plan in PLANS}
NAMESPACED = ("namespaces", "user_namespaces")
SYSTEM_PYTHON = "/usr/bin/python3"


def works(plan: host.Plan) -> bool:
    try:
        return host._Call(host._PROBE, Limits(timeout_s=60, cpu_s=60), plan).run().head == "42\n"
    except OSError:
        return False


@pytest.fixture(params=[plan.name for plan in PLANS])
def plan(request, monkeypatch):
    if request.param == "uid" and os.geteuid() == 0 and Path(SYSTEM_PYTHON).exists():
        monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON)  # this one may lie where other users cannot read it
    plan = BY_NAME[request.param]
    if not works(plan):
        pytest.skip(f"plan {plan.name} does not work here; it needs {plan.needs}")
    return plan


@pytest.fixture(params=NAMESPACED)
def namespaces(request):
    plan = BY_NAME[request.param]
    if not works(plan):
        pytest.skip(f"plan {plan.name} does not work here; it needs {plan.needs}")
    return plan


async def run(plan, source, **limits):
    """The outcome, after a look whether anything is left."""
    limits = Limits(**{"timeout_s": unique(300.0), "cpu_s": 60.0, **limits})
    outcome = await run_python(textwrap.dedent(source), limits, plan)
    assert gone(limits.timeout_s)
    assert zombies() == []
    return outcome


async def output(plan, source, **limits):
    outcome = await run(plan, source, **limits)
    assert (outcome.reason, outcome.value) == ("exit", 0), outcome
    return outcome.head


async def test_a_program_sees_nothing_of_the_trainer(plan, monkeypatch):
    monkeypatch.setenv("CANARY_JUDGE_KEY", "canary-123")
    seen = await output(plan, "import os, sys\nprint(dict(os.environ), open('/proc/self/environ').read(), sys.argv)")
    assert "canary" not in seen
    assert set(eval(seen.partition("}")[0] + "}")) >= {"HOME", "PATH"}


async def test_every_call_has_an_empty_folder_that_is_gone_afterwards(plan):
    source = (
        "import os\nprint(os.listdir())\nopen('a', 'w').write('x')\nos.makedirs('b/c')\nos.chmod('b', 0)\nos.getcwd()"
    )
    for _ in range(2):
        first, folder = (await output(plan, source)).splitlines()
        assert first == "[]"
        assert plan.name in NAMESPACED or not Path(folder.strip("'")).exists()


async def test_a_link_out_of_the_folder_is_not_followed_when_it_is_removed(plan, tmp_path):
    (tmp_path / "kept").write_text("x")
    assert await output(plan, f"import os\nos.symlink({str(tmp_path)!r}, 'link')\nprint(1)") == "1\n"
    assert (tmp_path / "kept").read_text() == "x"


@pytest.mark.parametrize(
    "escape",
    [
        "subprocess.Popen(['sleep', MARK])",
        "subprocess.Popen(['sleep', MARK], start_new_session=True)",
        "subprocess.Popen('(setsid sleep ' + MARK + ' &) &', shell=True)",
        "[os.fork() or (os.setsid(), os.fork() or time.sleep(float(MARK)), time.sleep(600)) for _ in range(3)]",
        "os.fork() or [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 15)] and time.sleep(600)",
        "os.fork() or (os.setsid(), os.close(1), os.close(2), os.kill(os.getpid(), signal.SIGSTOP))",
    ],
)
async def test_nothing_that_a_program_started_outlives_it(plan, escape):
    mark = unique(600.0)
    lines = ("import os, signal, subprocess, time", f"MARK, me = '{mark}', os.getpid()", escape)
    source = "\n".join([*lines, "if os.getpid() == me: print('x')"])
    assert "x\n" in await output(plan, source)
    assert gone(mark)


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "sum(range(10**12))",
        "import signal, time\nfor n in (1, 2, 15, 20): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(1)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import os, time\nos.fork()\nos.close(1)\nos.close(2)\ntime.sleep(60)",
        "import time\nclass A:\n    def __del__(self, sleep=time.sleep): sleep(60)\na = A()",
        "import atexit, time\natexit.register(time.sleep, 60)",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
    ],
)
async def test_the_clock_stops_whatever_runs(plan, source):
    assert (await run(plan, source, timeout_s=unique(1.0))).reason == "timeout"


async def test_cpu_time_has_a_limit_of_its_own(plan):
    outcome = await run(plan, "while True: pass", cpu_s=1.0, timeout_s=unique(300.0))
    assert (outcome.reason, outcome.value) == ("signal", 24)


async def test_what_was_printed_before_the_end_is_kept(plan):
    outcome = await run(plan, "import time\nprint('early')\ntime.sleep(60)", timeout_s=unique(4.0))
    assert (outcome.reason, outcome.head) == ("timeout", "early\n")


async def test_one_process_cannot_take_more_memory(plan):
    outcome = await run(plan, "b = bytearray(10**9)", memory_mb=256)
    assert outcome.value == 1 and outcome.head.endswith("MemoryError\n")


async def test_all_processes_together_cannot_either(plan):
    source = """
        import os, time
        for _ in range(3):
            if os.fork() == 0: break
        block = bytearray(os.urandom(1 << 20)) * 100
        time.sleep(30)
    """
    assert (await run(plan, source, memory_mb=256)).reason == "memory"


async def test_a_fork_bomb_is_stopped(plan):
    source = """
        import os, time
        while True:
            try: os.fork()
            except OSError: time.sleep(0.1)
            time.sleep(PACE)
    """
    source = source.replace("PACE", "0.05" if plan.name == "none" else "0")
    outcome = await run(plan, source, processes=20, timeout_s=unique(60.0 if plan.name == "none" else 3.0))
    assert outcome.reason in ("timeout", "processes")
    assert plan.name != "none" or outcome.reason == "processes"


async def test_a_big_file_is_refused(plan):
    source = "try: open('f', 'wb').write(b'x' * (9 << 20))\nexcept OSError as error: print(error.errno)"
    assert await output(plan, source, disk_mb=8) in ("27\n", "28\n")


async def test_many_files_are_refused_under_namespaces(namespaces):
    source = """
        try:
            for n in range(20): open(f'{n}', 'wb').write(b'x' * (1 << 20))
        except OSError as error: print(error.errno)
    """
    assert await output(namespaces, source, disk_mb=8) == "28\n"


async def test_a_flood_of_output_is_cut_and_does_not_slow_the_program(plan):
    source = "for n in range(200_000): print(f'{n:0100d}')"
    outcome = await run(plan, source, output_bytes=1000)
    assert outcome.reason == "exit"
    assert len(outcome.head) == len(outcome.tail) == 500 and outcome.left_out == 200_000 * 101 - 1000
    assert outcome.head.startswith("0" * 100 + "\n") and outcome.tail.endswith("199999\n")


async def test_the_cut_does_not_split_a_character(plan):
    outcome = await run(plan, "print('é€😀' * 1000, end='')", output_bytes=1001)
    assert "\ufffd" not in outcome.head + outcome.tail
    assert set(outcome.head + outcome.tail) == set("é€😀")


async def test_bytes_that_are_no_text_are_replaced(plan):
    assert await output(plan, "import os; x = os.write(1, b'a\\xff\\x00b')") == "a\ufffd\0b"


async def test_a_flooding_child_that_keeps_the_pipe_does_not_hold_the_call(plan):
    source = """
        import os
        if os.fork() == 0:
            os.setsid()
            while True: os.write(1, b'y' * 4096)
        print('done')
    """
    assert (await run(plan, source)).reason == "exit"


async def test_stdin_is_empty(plan):
    assert await output(plan, "import sys; sys.stdin.read()") == "''\n"


async def test_a_large_source(plan):
    assert await output(plan, "x = '" + "a" * (1 << 20) + "'\nlen(x)") == f"{1 << 20}\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print(1)\0", "null bytes"),
        ("x = '\ud800'", "surrogates"),
        ("(" * 5000, ""),
        ("# coding: latin-1\n1 +", "invalid"),
    ],
)
async def test_a_source_that_is_no_program(plan, source, said):
    outcome = await run(plan, source)
    assert outcome.reason in ("exit", "signal") and outcome.value != 0
    assert said in outcome.head


async def test_a_coding_line_does_not_change_the_text(plan):
    assert await output(plan, "# -*- coding: latin-1 -*-\n'é'") == "'é'\n"


async def test_the_traceback_shows_the_program_and_nothing_else(plan):
    outcome = await run(plan, "print('before')\ndef f(): return 1 / 0\nf()")
    assert outcome.head.startswith(
        'before\nTraceback (most recent call last):\n  File "program.py", line 3, in <module>'
    )
    assert "return 1 / 0" in outcome.head and "guard" not in outcome.head


async def test_no_network_under_namespaces(namespaces):
    source = """
        import socket
        for address in (('127.0.0.1', PORT), ('1.1.1.1', 53)):
            try: socket.create_connection(address, 5)
            except OSError as error: print(error.errno)
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = source.replace("PORT", str(server.getsockname()[1]))
        assert await output(namespaces, source) == "101\n101\n"


async def test_memory_outside_of_every_limit_is_not_to_be_had(namespaces):
    source = """
    import ctypes
    calls = ctypes.CDLL(None)
    for flags in (0x10000000, 0x10020000, 0x10000000 | 0x20000000):  # a user namespace, alone and with others
        print(calls.unshare(flags), calls.mount(b"none", b"/tmp", b"tmpfs", 0, None))
    """
    assert (await output(namespaces, source)).split() == ["-1"] * 6


async def test_files_of_the_machine_are_out_of_sight_under_namespaces(namespaces, tmp_path):
    (tmp_path / "answers.jsonl").write_text("secret")
    source = f"""
        import os
        print(os.path.exists({str(tmp_path / "answers.jsonl")!r}), os.path.exists({__file__!r}))
        print([name for name in os.listdir('/proc') if name.isdigit()])
        for path in ('/usr/x', '/etc/x', os.__file__):
            try: open(path, 'w')
            except OSError as error: print(type(error).__name__)
    """
    lines = (await output(namespaces, source)).splitlines()
    assert lines[:2] == ["False False", "['1', '2']"]
    assert len(lines) >= 4


async def test_the_guard_cannot_be_read_or_killed_under_namespaces(namespaces):
    source = """
        import os, signal
        for sent in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
            try: os.kill(1, sent)
            except PermissionError: pass
        try: os.killpg(0, 0)
        except OSError: pass
        for name in ('environ', 'mem', 'fd/0'):
            try: open(f'/proc/1/{name}', 'rb').read(1)
            except OSError as error: print(type(error).__name__)
    """
    assert await output(namespaces, source) == "PermissionError\n" * 3


async def test_no_privileges_are_left_or_gained(plan):
    source = """
        status = dict(line.split(':', 1) for line in open('/proc/self/status'))
        print(int(status['CapEff'], 16), int(status['CapPrm'], 16), status['NoNewPrivs'].strip())
    """
    assert await output(plan, source) == "0 0 1\n"


async def test_a_stopped_guard_is_killed_with_its_tree(monkeypatch):
    monkeypatch.setattr(host, "SLACK_S", 1.0)
    mark = unique(60.0)
    source = (
        "import os, signal, subprocess, time\n"
        f"subprocess.Popen(['sleep', '{mark}'])\n"
        "os.kill(os.getppid(), signal.SIGSTOP)\n"
        "time.sleep(60)"
    )
    with pytest.raises(OSError, match="no report"):
        await run_python(source, Limits(timeout_s=unique(2.0)), BY_NAME["none"])
    assert gone(mark) and zombies() == []


async def test_cancelling_kills_the_tree(plan):
    limits, mark = Limits(timeout_s=unique(60.0), cpu_s=60), unique(60.0)
    source = f"import subprocess, time\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)\ntime.sleep(60)"
    task = asyncio.create_task(run_python(source, limits, plan))
    while not living(mark):
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(gone, mark) and await asyncio.to_thread(gone, limits.timeout_s)


def test_the_tree_dies_with_the_trainer(plan):
    limit, mark = unique(60.0), unique(60.0)
    program = f"import subprocess, time\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)\ntime.sleep(60)"
    trainer = f"""
import asyncio, sys
sys.executable = {sys.executable!r}
from rltr_verl.sandbox import PLANS, Limits, run_python
plan = next(plan for plan in PLANS if plan.name == {plan.name!r})
asyncio.run(run_python({program!r}, Limits(timeout_s={limit}, cpu_s=60), plan))
"""
    process = subprocess.Popen([ORIGINAL_PYTHON, "-c", trainer])
    while not living(mark):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert gone(mark) and gone(limit)


ORIGINAL_PYTHON = sys.executable


async def test_sixty_four_at_once_and_the_loop_goes_on():
    beats, stop = 0, asyncio.Event()

    async def beat():
        nonlocal beats
        while not stop.is_set():
            beats += 1
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(beat())
    limits = Limits(timeout_s=unique(600.0), cpu_s=60.0)
    outcomes = await asyncio.gather(*(run_python(f"{n} * 2", limits) for n in range(64)))
    stop.set()
    await ticking
    assert [outcome.head for outcome in outcomes] == [f"{2 * n}\n" for n in range(64)]
    assert beats > 20  # it beat on while they ran
    assert gone(limits.timeout_s) and zombies() == []


async def test_descriptors_and_threads_do_not_grow():
    limits = Limits(timeout_s=30.0)
    await run_python("1", limits)
    before = psutil.Process().num_fds()
    for _ in range(5):
        await run_python("1", limits)
    assert psutil.Process().num_fds() <= before + 2
    assert threading.active_count() < 300


async def test_a_guard_that_cannot_start_is_the_sandbox_s_own_failure(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(OSError):
        await run_python("1", Limits(), PLANS[-1])
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    with pytest.raises(OSError, match="the sandbox failed"):
        await run_python("1", Limits(), PLANS[-1])


def test_limits_are_above_zero():
    with pytest.raises(ConfigError, match="processes"):
        Limits(processes=0)


def test_the_best_plan_is_the_first_that_works(monkeypatch):
    assert best_plan() is next(plan for plan in PLANS if plan is PLANS[-1] or works(plan))


@pytest.mark.skipif(os.geteuid() != 0 or not Path(SYSTEM_PYTHON).exists(), reason="wants root and a system's Python")
def test_an_ordinary_user_has_it_too():
    root = Path(__file__).parents[2]
    code = (
        "import asyncio, os, sys\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "from rltr_verl.sandbox import *\n"
        "plan = best_plan()\n"
        "outcome = asyncio.run(run_python('import os; os.getuid()', Limits(), plan))\n"
        "print(plan.name, outcome.head.strip())"
    )
    done = subprocess.run(
        [SYSTEM_PYTHON, "-c", code], cwd="/", env={"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=500
    )
    if "ModuleNotFoundError: No module named 'rltr_verl'" in done.stderr:
        pytest.skip("other users cannot read this checkout")
    assert done.stdout.split() in (["user_namespaces", "1000"], ["none", "65534"]), done.stderr
