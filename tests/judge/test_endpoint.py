"""The endpoint checker against a real HTTP server on loopback."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rltr_verl.config import JudgeSettings
from rltr_verl.errors import ConfigError, Unscored
from rltr_verl.judge import build_checker
from rltr_verl.trajectory import Trajectory

TRAJECTORY = Trajectory.from_messages([{"role": "assistant", "content": "<answer>"}], "q")
CASES = {
    case["id"]: case["input"]
    for case in map(json.loads, (Path(__file__).parents[1] / "cases/checker_client.jsonl").read_text().splitlines())
}


def completion(content, finish="stop", **message):
    return {"choices": [{"message": {"content": content, **message}, "finish_reason": finish}]}


class Judge:
    """A judge server; ``script(number, payload)`` answers request ``number`` (0, 1, ...)."""

    def __init__(self, script):
        self.script, self.requests, self.active, self.peak = script, [], 0, 0

    async def handle(self, request):
        payload = await request.json()
        self.requests.append((payload, dict(request.headers)))
        self.active += 1
        self.peak = max(self.peak, self.active)
        try:
            answer = self.script(len(self.requests) - 1, payload)
            answer = await answer if asyncio.iscoroutine(answer) else answer
        finally:
            self.active -= 1
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)


@asynccontextmanager
async def asking(script, **settings):
    """A checker connected to a judge that answers by ``script``."""
    judge = Judge(script)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.handle)
    async with TestServer(app) as server:
        base = {"backend": "endpoint", "base_url": str(server.make_url("/v1/")), "model": "m", "n_votes": 1}
        checker = build_checker(JudgeSettings(**{**base, **settings}))
        try:
            yield judge, checker
        finally:
            await checker.close()


def status(code, headers=None, body=""):
    return lambda *_: web.Response(status=code, text=body, headers=headers)


async def test_n_votes_each_with_its_own_seed_and_the_same_prompt():
    async with asking(lambda number, _: completion(f"Score: {number % 2}"), n_votes=4, temperature=0.7) as (
        judge,
        checker,
    ):
        votes = await checker.check(TRAJECTORY, {})
        seeds = [payload["seed"] for payload, _ in judge.requests]
    assert sorted(votes.values) == [0, 0, 1, 1] and votes.mean == 0.5
    assert len(set(seeds)) == 4
    assert len({json.dumps(payload["messages"]) for payload, _ in judge.requests}) == 1
    assert {payload["temperature"] for payload, _ in judge.requests} == {0.7}
    assert votes.record["prompt"].startswith("completeness_en@") and votes.record["judge"] == "m"


async def test_unreadable_votes_leave_the_mean():
    replies = ["Score: 1", "I cannot evaluate this.", "Score: 0"]
    async with asking(lambda number, _: completion(replies[number]), n_votes=3) as (_, checker):
        votes = await checker.check(TRAJECTORY, {})
    assert votes.mean == 0.5 and sorted(votes.readable) == [0, 1]
    assert "no readable verdict in 'I cannot evaluate this.'" in votes.record["failed_votes"][0]


async def test_fewer_than_min_votes_is_unscored():
    replies = ["Score: 1", "?", "?"]
    async with asking(lambda number, _: completion(replies[number]), n_votes=3, min_votes=2) as (_, checker):
        with pytest.raises(Unscored, match="1 of 3 votes are readable.*Fix:"):
            await checker.check(TRAJECTORY, {})


async def test_429_waits_as_long_as_the_server_asks():
    def script(number, _):
        return web.Response(status=429, headers={"Retry-After": "1"}) if number == 0 else completion("1")

    async with asking(script) as (judge, checker):
        start = time.monotonic()
        votes = await checker.check(TRAJECTORY, {})
    assert votes.values == (1,) and len(judge.requests) == 2
    assert 1.0 <= time.monotonic() - start < 3.0


@pytest.mark.parametrize(
    "fault",
    [
        status(500),
        status(503, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        status(200, body='{"choices": [{"mess'),
        lambda *_: {"error": {"message": "overloaded", "code": 500}},
        lambda *_: {"choices": []},
        lambda *_: [],
    ],
    ids=["500", "503 with a date", "truncated JSON", "error body", "no choices", "a list"],
)
async def test_passing_faults_are_tried_again(fault):
    async with asking(lambda number, payload: fault() if number == 0 else completion("0")) as (judge, checker):
        assert (await checker.check(TRAJECTORY, {})).values == (0,)
    assert len(judge.requests) == 2


async def test_a_judge_that_stays_down_is_unscored_after_the_retries():
    """Case C12a: never a plain 0."""
    async with asking(status(503, {"Retry-After": "0"}), n_votes=3, retries=2) as (judge, checker):
        with pytest.raises(Unscored, match="0 of 3 votes are readable .*HTTP 503"):
            await checker.check(TRAJECTORY, {})
    assert len(judge.requests) == 9


@pytest.mark.parametrize("code", [400, 401, 404, 422])
async def test_other_4xx_are_not_tried_again(code):
    """Case C17b."""
    async with asking(status(code, body="maximum context length is 8192 tokens"), n_votes=2) as (judge, checker):
        with pytest.raises(Unscored, match=f"HTTP {code}: 'maximum context length"):
            await checker.check(TRAJECTORY, {})
    assert len(judge.requests) == 2


@pytest.mark.parametrize("name", ["C19a"])
async def test_verdict_is_not_taken_from_the_reasoning(name):
    async with asking(lambda *_: CASES[name]["body"]) as (judge, checker):
        with pytest.raises(Unscored, match="0 of 1"):
            await checker.check(TRAJECTORY, {})
    assert len(judge.requests) == 1


@pytest.mark.parametrize("name", ["C09b", "C19b"])
async def test_bodies_without_a_reply_fail(name):
    async with asking(lambda *_: CASES[name]["body"], retries=0) as (_, checker):
        with pytest.raises(Unscored, match="no chat completion"):
            await checker.check(TRAJECTORY, {})


async def test_a_reply_cut_off_at_max_tokens_is_no_verdict():
    async with asking(lambda *_: completion("Score: 1, since", finish="length")) as (_, checker):
        with pytest.raises(Unscored, match="cut off at max_tokens"):
            await checker.check(TRAJECTORY, {})


async def hang(*_):
    await asyncio.sleep(30)


async def test_a_hanging_judge_ends_at_the_deadline_and_others_finish():
    """Case C16a."""

    def script(number, _):
        return hang() if number == 0 else completion("1")

    async with asking(script, n_votes=2, timeout_s=0.5, retries=0) as (_, checker):
        start = time.monotonic()
        votes = await checker.check(TRAJECTORY, {})
        assert time.monotonic() - start < 2.0
    assert sorted(votes.values, key=str) == [1, None]
    assert "no reply within 0.5 s" in votes.record["failed_votes"][0]


async def test_the_deadline_is_for_the_whole_reply():
    """Case C16b: a server that sends a byte now and then."""

    async def slowly(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(50):
            await response.write(b" ")
            await asyncio.sleep(0.1)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", slowly)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        checker = build_checker(
            JudgeSettings(backend="endpoint", base_url=url, model="m", n_votes=1, timeout_s=0.5, retries=0)
        )
        start = time.monotonic()
        with pytest.raises(Unscored, match="no reply within"):
            await checker.check(TRAJECTORY, {})
        assert time.monotonic() - start < 2.0
        await checker.close()


async def test_a_refused_connection_is_unscored():
    checker = build_checker(
        JudgeSettings(backend="endpoint", base_url="http://127.0.0.1:9/v1", model="m", n_votes=1, retries=0)
    )
    with pytest.raises(Unscored, match="ClientConnectorError"):
        await checker.check(TRAJECTORY, {})
    await checker.close()


async def test_concurrency_bounds_the_requests_in_flight():
    """Case C26a in small; waiting for a slot does not count against the deadline."""

    async def slow():
        await asyncio.sleep(0.05)
        return completion("1")

    async with asking(lambda *_: slow(), n_votes=4, concurrency=8, timeout_s=0.5) as (judge, checker):
        votes = await asyncio.gather(*(checker.check(TRAJECTORY, {}) for _ in range(40)))
    assert all(item.values == (1, 1, 1, 1) for item in votes)
    assert len(judge.requests) == 160 and judge.peak <= 8


async def test_proxy_variables_are_not_used(monkeypatch):
    """Case C27a."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")
    async with asking(lambda *_: completion("1"), retries=0) as (_, checker):
        assert (await checker.check(TRAJECTORY, {})).values == (1,)


async def test_key_comes_from_the_named_variable(monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", "secret")
    async with asking(lambda *_: completion("1"), api_key_env="MY_JUDGE_KEY") as (judge, checker):
        await checker.check(TRAJECTORY, {})
    assert judge.requests[0][1]["Authorization"] == "Bearer secret"


def test_a_missing_key_is_told_before_any_request(monkeypatch):
    monkeypatch.delenv("MY_JUDGE_KEY", raising=False)
    settings = JudgeSettings(backend="endpoint", base_url="http://h/v1", model="m", api_key_env="MY_JUDGE_KEY")
    with pytest.raises(ConfigError, match="MY_JUDGE_KEY is not set.*Fix: export"):
        build_checker(settings)


def test_votes_at_temperature_0_are_warned_about(caplog):
    """Case X11."""
    build_checker(JudgeSettings(backend="endpoint", base_url="http://h/v1", model="m", n_votes=3, temperature=0))
    assert "the 3 votes of a trajectory are one vote" in caplog.text
