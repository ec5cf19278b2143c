"""The bound on requests over all processes of a node: real processes, real locks."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rltr_verl.errors import ConfigError
from rltr_verl.judge.slots import NodeSlots, fair_share
from tests.fakes.openai_server import FakeServer

ROOT = Path(__file__).parents[2]
WORKER = """
import asyncio, json, resource, sys, time
options = json.loads(sys.argv[1])
if "files" in options:
    resource.setrlimit(resource.RLIMIT_NOFILE, (options["files"], options["files"]))
from rltr_verl.judge.chat import ChatClient
from rltr_verl.judge.slots import NodeSlots

async def main():
    slots = NodeSlots(options["limit"], options["url"])
    client = ChatClient([options["url"]], slots=slots, timeout_s=600)
    deadline = asyncio.get_running_loop().time() + 1200
    payload = {"model": "m", "messages": [{"role": "user", "content": options["name"]}]}
    print("ready", flush=True)
    sys.stdin.readline()
    done = []
    async def one():
        await client.complete(payload, deadline=deadline)
        done.append(time.time())
    await asyncio.gather(*(one() for _ in range(options["requests"])))
    await client.close()
    slots.close()
    print(json.dumps(done), flush=True)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Lock files of this test alone, also for its processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


async def worker(server, name, requests, limit=4, **options):
    given = json.dumps({"url": server.url, "name": name, "requests": requests, "limit": limit, **options})
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, given, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=None
    )
    assert await process.stdout.readline() == b"ready\n"
    return process


def start(*processes):
    for process in processes:
        process.stdin.write(b"\n")


async def finished(process):
    out, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(out)


async def test_the_limit_holds_over_processes_and_is_reached():
    async with FakeServer(latency_s=0.05) as server:
        workers = [await worker(server, str(number), 40) for number in range(3)]
        start(*workers)
        for process in workers:
            assert len(await finished(process)) == 40
    assert server.count == 120 and server.peak == 4


async def test_processes_share_evenly_while_all_have_work():
    """A process that comes second does not wait until the first is done."""
    async with FakeServer(latency_s=0.05) as server:
        first, second = await worker(server, "first", 160), await worker(server, "second", 40)
        start(first)
        while server.count < 20:
            await asyncio.sleep(0.01)
        start(second)
        ends = [await finished(second), await finished(first)]
    assert server.peak <= 4
    beaten = sum(end < max(ends[0]) for end in ends[1])
    assert beaten < 120  # of 160; about 60 with an even share


async def test_no_process_starves_where_there_are_more_processes_than_slots():
    async with FakeServer(latency_s=0.02) as server:
        workers = [await worker(server, str(number), 60, limit=1) for number in range(3)]
        start(*workers)
        ends = [await finished(process) for process in workers]
    assert server.peak == 1
    assert max(min(times) for times in ends) < min(max(times) for times in ends)  # all began before one was done


async def test_a_killed_process_frees_its_slots():
    async with FakeServer(lambda number, _: asyncio.sleep(3600 if number < 4 else 0, "1")) as server:
        killed, other = await worker(server, "killed", 8), await worker(server, "other", 8)
        start(killed)
        while server.count < 4:
            await asyncio.sleep(0.01)
        start(other)
        await asyncio.sleep(0.3)
        assert server.count == 4
        os.kill(killed.pid, signal.SIGKILL)
        assert len(await finished(other)) == 8
        await killed.wait()


async def test_few_open_files():
    """Case C26a: 512 samples of 4 votes with 256 open files."""
    async with FakeServer(latency_s=0.01) as server:
        process = await worker(server, "few", 2048, limit=512, files=256)
        start(process)
        assert len(await finished(process)) == 2048
    assert server.sockets < 256 and server.peak < 256


def test_few_open_files_are_warned_about(monkeypatch, caplog):
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
    slots = NodeSlots(512, "few")
    assert 1 <= slots.local_limit < 256
    assert "may open 256 files" in caplog.text and "ulimit -n" in caplog.text


async def test_two_in_one_process_share_one_limit():
    one, two = NodeSlots(3, "same"), NodeSlots(3, "same")
    running = peak = 0

    async def use(slots):
        nonlocal running, peak
        async with slots:
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0.01)
            running -= 1

    await asyncio.gather(*(use(slots) for slots in (one, two) for _ in range(30)))
    assert peak == 3 and one.in_use == two.in_use == 0


async def test_different_names_do_not_share():
    one, two = NodeSlots(1, "one"), NodeSlots(1, "two")
    async with one, two:
        assert one.in_use == two.in_use == 1


async def test_a_deadline_ends_the_wait_and_a_cancelled_one_loses_no_slot():
    slots = NodeSlots(1, "deadline")
    loop = asyncio.get_running_loop()
    await slots.acquire()
    with pytest.raises(asyncio.TimeoutError):
        await slots.acquire(loop.time() + 0.05)
    waiting = asyncio.create_task(slots.acquire(loop.time() + 60))
    await asyncio.sleep(0)
    slots.release()  # hands the slot over
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(slots.acquire(), 60)
    slots.release()
    assert slots.in_use == 0


async def test_closing_frees_the_slots():
    one, two = NodeSlots(1, "close"), NodeSlots(1, "close")
    await one.acquire()
    one.close()
    await asyncio.wait_for(two.acquire(), 60)


def test_one_object_serves_one_event_loop_after_another():
    slots = NodeSlots(1, "loops")

    async def use():
        async with slots:
            await asyncio.sleep(0)

    async def several():
        await asyncio.gather(*(use() for _ in range(3)))

    for _ in range(2):
        asyncio.run(several())


async def test_a_forked_child_holds_nothing_of_its_parent():
    slots = NodeSlots(1, "fork")
    async with slots:
        code = "import asyncio, sys; from rltr_verl.judge.slots import NodeSlots\n"
        code += "async def main():\n    s = NodeSlots(1, 'fork')\n"
        code += "    await s.acquire(asyncio.get_running_loop().time() + 0.2)\n"
        code += "try:\n    asyncio.run(main())\nexcept asyncio.TimeoutError:\n    sys.exit(7)\n"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=500).returncode == 7
        child = os.fork()
        if child == 0:
            os._exit(0 if NodeSlots(1, "fork")._ledger.take(1) is None else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_folder_that_cannot_be_used_is_told(tmp_path, monkeypatch):
    (tmp_path / f"rltr_slots_{os.getuid()}").write_text("a file")
    with pytest.raises(ConfigError, match="lock files cannot be kept.*Fix: free the path"):
        NodeSlots(1, "x")


async def test_waiting_costs_little_cpu():
    holder, waiting = NodeSlots(64, "cpu"), NodeSlots(64, "cpu")
    for _ in range(64):
        await holder.acquire()
    tasks = [asyncio.create_task(waiting.acquire()) for _ in range(500)]
    await asyncio.sleep(0.1)
    begin, wall = time.process_time(), time.monotonic()
    await asyncio.sleep(1.0)
    assert (time.process_time() - begin) / (time.monotonic() - wall) < 0.2
    waiting.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    holder.close()


@pytest.mark.parametrize(
    ("limit", "mine", "others", "share"),
    [
        (64, 500, [], 64),
        (64, 500, [500], 32),
        (64, 500, [5], 59),
        (64, 5, [500], 32),
        (64, 500, [500, 500], 22),
        (64, 500, [10, 500], 27),
        (64, 500, [500, 10, 4], 25),
        (2, 9, [9, 9, 9], 1),
        (3, 9, [9], 2),
        (1, 1, [1], 1),
    ],
)
def test_fair_share(limit, mine, others, share):
    assert fair_share(limit, mine, others) == share
