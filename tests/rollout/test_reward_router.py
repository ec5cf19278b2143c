"""The router in front of a hosted judge passes on what the servers say, from a process of its own as verl starts it."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Iterator

import aiohttp
import pytest
from aiohttp import web

from rltr_verl.rollout.reward_router import run_router
from tests.fakes.ports import dead_port, free_port


@pytest.fixture
async def server() -> Iterator[tuple[str, list]]:
    """A server that answers what the request asks for; its URL and what it was sent."""
    seen: list = []

    async def answer(request: web.Request) -> web.Response:
        asked = await request.json() if request.can_read_body else {"status": 200, "headers": {}}
        seen.append((request.method, request.path, request.headers.get("Authorization"), asked))
        return web.json_response({"said": asked}, status=asked["status"], headers=asked["headers"])

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    await runner.cleanup()


@pytest.fixture
def route() -> Iterator:
    """``route(urls)``: the URL of a running router in front of them."""
    started = []

    def start(urls: list[str]) -> str:
        port = free_port()
        process = multiprocessing.get_context("spawn").Process(target=run_router, args=("127.0.0.1", port, urls))
        process.start()
        started.append(process)
        deadline = time.monotonic() + 300
        while True:
            assert process.is_alive() and time.monotonic() < deadline
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}"
            time.sleep(0.1)

    yield start
    for process in started:
        process.terminate()
        process.join(30)


async def test_status_body_and_headers_come_back_as_the_server_sent_them(server, route):
    url, seen = server
    router = route([url])
    async with aiohttp.ClientSession(trust_env=False) as client:
        for status, headers in ((200, {}), (400, {}), (422, {}), (429, {"Retry-After": "7"}), (503, {})):
            asked = {"status": status, "headers": headers}
            head = {"Authorization": "Bearer key"}
            async with client.post(f"{router}/v1/chat/completions", json=asked, headers=head) as reply:
                assert reply.status == status
                assert await reply.json() == {"said": asked}
                assert reply.headers.get("Retry-After") == headers.get("Retry-After")
                assert reply.content_type == "application/json"
            assert seen[-1] == ("POST", "/v1/chat/completions", "Bearer key", asked)
        async with client.get(f"{router}/v1/models") as reply:
            assert reply.status == 200
    assert seen[-1][:2] == ("GET", "/v1/models")


async def test_a_server_that_is_gone_is_a_fault_that_may_pass(route):
    with dead_port() as port:
        url = f"{route([f'http://127.0.0.1:{port}'])}/v1/chat/completions"
        async with aiohttp.ClientSession(trust_env=False) as client, client.post(url, json={}) as reply:
            assert reply.status == 502
            assert "ClientConnectorError" in await reply.text()


async def test_requests_at_the_same_time_go_to_different_servers(route):
    waiting, released = asyncio.Semaphore(0), asyncio.Event()

    async def serve(number: int) -> tuple[web.AppRunner, str]:
        async def answer(request: web.Request) -> web.Response:
            waiting.release()
            await released.wait()
            return web.json_response({"server": number})

        app = web.Application()
        app.router.add_post("/ask", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"

    servers = [await serve(number) for number in range(3)]
    router = await asyncio.to_thread(route, [url for _, url in servers])

    async def ask(client: aiohttp.ClientSession) -> int:
        async with client.post(f"{router}/ask", json={}) as reply:
            return (await reply.json())["server"]

    async with aiohttp.ClientSession(trust_env=False) as client:
        asked = [asyncio.create_task(ask(client)) for _ in range(6)]
        for _ in range(6):
            await asyncio.wait_for(waiting.acquire(), 300)
        released.set()
        assert sorted(await asyncio.gather(*asked)) == [0, 0, 1, 1, 2, 2]
    for runner, _ in servers:
        await runner.cleanup()
