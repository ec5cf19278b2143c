"""The chat client against a real HTTP server on loopback."""

import asyncio
import time
from contextlib import asynccontextmanager, suppress

import pytest

from rltr_verl.judge.chat import ChatClient
from rltr_verl.judge.replies import ChatFailed
from tests.fakes.openai_server import FakeServer, Reply

PAYLOAD = {"model": "m", "messages": [{"role": "user", "content": "Is it complete? 完整吗 \ud83c"}]}
BUSY = Reply(status=429, headers={"Retry-After": "0"})
DEAD = "http://127.0.0.1:9/v1"


@asynccontextmanager
async def asking(*servers, urls=(), **options):
    client = ChatClient([*urls, *(server.url for server in servers)], **options)
    try:
        yield client
    finally:
        await client.close()


async def complete(client, within=120.0, **options):
    return await client.complete(PAYLOAD, deadline=asyncio.get_running_loop().time() + within, **options)


async def failure(client, within=120.0):
    with pytest.raises(ChatFailed) as caught:
        await complete(client, within)
    return caught.value


async def test_a_reply_with_what_it_took():
    async with FakeServer(Reply("Score: 1", reasoning="first ...", usage=(120, 7))) as server, asking(server) as client:
        reply = await complete(client)
    assert (reply.content, reply.reasoning, reply.finish) == ("Score: 1", "first ...", "stop")
    assert (reply.prompt_tokens, reply.completion_tokens, reply.url) == (120, 7, server.url)
    assert 0 < reply.latency_s < 10
    assert server.requests[0].prompt == "Is it complete? 完整吗 ?"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        (3, ""),
        ([{"type": "text", "text": "Score: "}, {"text": "1"}, 2], "Score: 1"),
        ([{"type": "reasoning", "text": "Score: 1"}, {"type": "output_text", "text": ""}], ""),
    ],
)
async def test_content_that_is_no_text(content, text):
    async with FakeServer(Reply(content, reasoning="so the score is 1")) as server, asking(server) as client:
        assert (await complete(client)).content == text


async def test_a_refusal_has_no_content():
    body = {"choices": [{"message": {"content": "Score: 1", "refusal": "I cannot."}, "finish_reason": "stop"}]}
    async with FakeServer([body]) as server, asking(server) as client:
        assert (await complete(client)).content == ""


async def test_a_byte_order_mark_is_no_fault():
    async with FakeServer(Reply(body="\ufeff" + Reply("1").text("m"))) as server, asking(server) as client:
        assert (await complete(client)).content == "1"


@pytest.mark.parametrize("finish", [None, "", "STOP", "eos", "end_turn", "stop_sequence"])
async def test_how_servers_say_that_a_reply_is_finished(finish):
    async with FakeServer(Reply("1", finish=finish)) as server, asking(server) as client:
        assert (await complete(client)).content == "1"


@pytest.mark.parametrize("finish", ["length", "max_tokens", "content_filter", "sensitive", "tool_calls", "repetition"])
async def test_a_reply_that_the_model_did_not_end_is_no_reply(finish):
    async with FakeServer(Reply("1", finish=finish)) as server, asking(server) as client:
        assert (await failure(client)).kind == "cut_off"
    assert server.count == 1


async def test_a_body_without_end_is_given_up():
    endless = Reply(body=" " * 2**25)
    async with FakeServer(endless) as server, asking(server, retries=0) as client:
        error = await failure(client)
    assert (error.kind, str(error)) == ("body", "the body is longer than 8388608 bytes")


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": None}, {"prompt_tokens": "3"}, [], 7])
async def test_usage_that_cannot_be_read_is_0(usage):
    body = {"choices": [{"message": {"content": "1"}, "finish_reason": "stop"}], "usage": usage}
    async with FakeServer([body]) as server, asking(server) as client:
        reply = await complete(client)
    assert (reply.prompt_tokens, reply.completion_tokens) == (0, 0)


@pytest.mark.parametrize(
    "fault",
    [
        BUSY,
        Reply(status=500),
        Reply(status=503, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        Reply(status=502, headers={"Retry-After": "soon"}, body="<html>Bad Gateway</html>"),
        Reply(fault="truncated_json"),
        Reply(fault="reset"),
        Reply(fault="reset_midway"),
        {"error": {"message": "overloaded", "code": 500}},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"message": None}]},
        {"choices": {"0": 1}},
        {"error": {"message": "overloaded"}, "choices": [{"message": {"content": "1"}, "finish_reason": "stop"}]},
        {"choices": [{"message": {"content": "1"}, "finish_reason": "stop", "error": {"code": 502}}]},
        Reply("1", finish="abort"),
        Reply("1", finish="network_error"),
        Reply(body='{"choices": [{"message": {"content": "0", "content": "1"}, "finish_reason": "stop"}]}'),
        Reply(body='data: {"choices": [{"delta": {"content": "1"}}]}\n\ndata: [DONE]\n\n'),
        Reply(body=" " * (2**23 + 1) + '{"choices": [{"message": {"content": "1"}}]}'),
        Reply(status=408),
        Reply(status=425),
        [],
        Reply(body="null"),
        Reply(body=""),
        Reply(body="[" * 100_000),
    ],
    ids=lambda fault: str(fault)[:60],
)
async def test_passing_faults_are_tried_again(fault):
    async with FakeServer([fault, "1"]) as server, asking(server) as client:
        assert (await complete(client)).content == "1"
    assert server.count == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 422, 301])
async def test_other_statuses_are_not_tried_again(status):
    async with (
        FakeServer(Reply(status=status, body="no", headers={"Location": "/v1/x"})) as server,
        asking(server) as client,
    ):
        error = await failure(client)
    assert (error.kind, error.status, error.url, server.count) == ("http", status, server.url, 1)
    assert str(error) == f"HTTP {status}: 'no'"


async def test_retries_end():
    async with FakeServer(BUSY) as server, asking(server, retries=2) as client:
        assert "HTTP 429" in str(await failure(client))
    assert server.count == 3


@pytest.mark.parametrize("status", [400, 413, 422])
@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 8192 tokens. However, you requested 10840 tokens",
        '{"error": {"code": "context_length_exceeded"}}',
        "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
        "Input is too long for requested model.",
        "prompt is too long: 210000 tokens > 200000 maximum",
        "Requested token count exceeds the model's maximum context length of 4096 tokens.",
        "the request exceeds the available context size. try increasing the context size",
        "`inputs` tokens + `max_new_tokens` must be <= 4096",
        "Please reduce the length of the messages.",
        "输入长度超过上下文长度限制",
    ],
)
async def test_a_prompt_longer_than_the_context_is_told_apart(status, said):
    async with FakeServer(Reply(status=status, body=said)) as server, asking(server) as client:
        assert (await failure(client)).kind == "context_overflow"
    assert server.count == 1


async def test_a_bad_request_is_no_context_overflow():
    async with FakeServer(Reply(status=400, body="temperature must be positive")) as server, asking(server) as client:
        assert (await failure(client)).kind == "http"


async def test_a_context_overflow_inside_a_200_is_not_tried_again():
    async with (
        FakeServer([{"error": {"message": "maximum context length is 8192", "code": 400}}]) as server,
        asking(server) as client,
    ):
        assert (await failure(client)).kind == "context_overflow"
    assert server.count == 1


async def test_a_cut_off_reply_is_paid_for():
    async with (
        FakeServer(Reply("Score: 1, since", finish="length", usage=(90, 512))) as server,
        asking(server) as client,
    ):
        error = await failure(client)
    assert (error.kind, error.prompt_tokens, error.completion_tokens, server.count) == ("cut_off", 90, 512, 1)


async def test_retry_after_is_waited_for():
    async with FakeServer([Reply(status=429, headers={"Retry-After": "1"}), "1"]) as server, asking(server) as client:
        start = time.monotonic()
        await complete(client)
        assert time.monotonic() - start >= 1.0


async def test_retry_after_holds_up_the_other_requests_too():
    """A rate limit: what is sent meanwhile would only be refused."""
    opens: list[float] = []

    def limited(*_):
        now = asyncio.get_running_loop().time()
        if not opens:
            opens.append(now + 1)
        return "1" if now >= opens[0] else Reply(status=429, headers={"Retry-After": "1"})

    async with (
        FakeServer(limited) as server,
        asking(server, retries=1) as client,
    ):
        first = asyncio.create_task(complete(client))
        while not client._servers[0].closed_until:  # until it has read the refusal
            await asyncio.sleep(0)
        await asyncio.gather(first, *(complete(client) for _ in range(20)))
    assert server.count == 22


async def test_retry_after_beyond_the_deadline_fails_at_once():
    refusal = Reply(status=429, headers={"Retry-After": "3600"})
    async with FakeServer(refusal) as server, asking(server, timeout_s=3600) as client:
        assert (await failure(client, within=3000)).status == 429
        assert (await failure(client, within=3000)).kind == "deadline"
    assert server.count == 1


@pytest.mark.parametrize("fault", [Reply(fault="hang"), Reply(fault="drip", drip_s=0.1)], ids=["hang", "drip"])
async def test_a_request_ends_at_its_own_deadline(fault):
    """Cases C16a, C16b: a byte now and then does not prolong it."""
    async with FakeServer(fault) as server, asking(server, timeout_s=1, retries=1) as client:
        error = await failure(client, within=3000)
    assert (error.kind, server.count) == ("timeout", 2)
    assert "no reply within 1 s" in str(error)


@pytest.mark.parametrize("fault", [Reply(fault="hang"), Reply(status=500), BUSY], ids=["hang", "500", "429"])
async def test_everything_ends_at_the_callers_deadline(fault):
    async with FakeServer(fault) as server, asking(server, retries=1000) as client:
        error = await failure(client, within=1.0)
    assert error.kind in ("deadline", "http")


async def test_a_deadline_in_the_past_sends_nothing():
    async with FakeServer() as server, asking(server) as client:
        assert (await failure(client, within=-1)).kind == "deadline"
    assert server.count == 0


async def test_a_refused_connection():
    async with asking(urls=[DEAD], retries=0) as client:
        error = await failure(client)
    assert error.kind == "transport" and "ClientConnectorError" in str(error)


async def test_proxy_variables_are_not_used(monkeypatch):
    """Case C27a."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")
    async with FakeServer() as server, asking(server, retries=0) as client:
        assert (await complete(client)).content == "Score: 1"


async def test_the_url_with_the_fewest_requests_is_asked():
    async with FakeServer(latency_s=0.2) as one, FakeServer(latency_s=0.2) as two, asking(one, two) as client:
        await asyncio.gather(*(complete(client) for _ in range(20)))
    assert (one.count, two.count) == (10, 10)


async def test_a_failed_url_rests_and_the_other_answers():
    async with (
        FakeServer(Reply(status=500)) as broken,
        FakeServer() as sound,
        asking(broken, sound, urls=[DEAD], retries=2, rest_s=3600) as client,
    ):
        for _ in range(30):
            assert (await complete(client)).url == sound.url
    assert broken.count <= 1 and sound.count == 30


async def test_a_rested_url_is_tried_again():
    async with (
        FakeServer([Reply(status=500), "1"]) as server,
        FakeServer() as other,
        asking(server, other, rest_s=0.2) as client,
    ):
        for _ in range(20):
            await complete(client)
        await asyncio.sleep(0.3)
        await asyncio.gather(*(complete(client) for _ in range(20)))
    assert server.count >= 2


async def test_one_url_alone_does_not_rest():
    async with FakeServer([Reply(status=500), "1"]) as server, asking(server, rest_s=3600) as client:
        await complete(client)
        await complete(client)
    assert server.count == 3


async def test_a_hanging_url_rests():
    async with (
        FakeServer(Reply(fault="hang")) as hanging,
        FakeServer() as sound,
        asking(hanging, sound, timeout_s=2, rest_s=3600) as client,
    ):
        for _ in range(20):
            assert (await complete(client)).url == sound.url
    assert hanging.count <= 1


async def test_each_url_gets_its_own_fields():
    async with FakeServer() as one, FakeServer() as two, asking(one, two) as client:
        await asyncio.gather(*(complete(client, fields=lambda url: {"asked": url}) for _ in range(8)))
    assert {request.payload["asked"] for request in one.requests} == {one.url}
    assert {request.payload["asked"] for request in two.requests} == {two.url}


def hanging_now_and_then(number, _):
    return Reply(fault="hang") if number > 100 and number % 40 == 0 else "1"


async def test_a_few_requests_that_hang_are_given_up_long_before_their_timeout():
    """No reply long after all others: asked again, and nobody waits for the timeout."""
    async with FakeServer(hanging_now_and_then, latency_s=0.01) as server, asking(server, timeout_s=5000) as client:
        for _ in range(2):
            await asyncio.wait_for(asyncio.gather(*(complete(client, within=5000) for _ in range(100))), 300)
    assert server.count >= 202


async def test_a_server_that_becomes_slow_is_waited_for():
    async with (
        FakeServer(lambda number, _: Reply("1", latency_s=0.5 if number >= 100 else 0)) as server,
        asking(server, retries=1) as client,
    ):
        await asyncio.gather(*(complete(client) for _ in range(100)))
        replies = await asyncio.gather(*(complete(client) for _ in range(20)))
    assert all(reply.content == "1" for reply in replies)


async def test_closing_twice_and_asking_after():
    async with FakeServer() as server, asking(server) as client:
        await complete(client)
        await client.close()
        await client.close()
        assert (await complete(client)).content == "Score: 1"


async def test_a_cancelled_request_leaves_nothing_in_flight():
    async with FakeServer(Reply(fault="hang")) as server, asking(server) as client:
        task = asyncio.create_task(complete(client))
        while not server.active:
            await asyncio.sleep(0.01)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for _ in range(6000):
            if not server.active:
                break
            await asyncio.sleep(0.01)
    assert server.active == 0


async def test_a_request_sent_before_any_reply_is_given_up_once_the_others_show_how_long_one_takes():
    """It hangs from the start, when nothing is known of the server yet; its timeout is far away."""
    async with (
        FakeServer(lambda number, _: Reply(fault="hang") if number == 0 else "1") as server,
        asking(server, timeout_s=600) as client,
    ):
        replies = await asyncio.wait_for(asyncio.gather(*(complete(client, 600) for _ in range(100))), 300)
    assert len(replies) == 100 and 101 <= server.count < 200  # a reply that comes late may be asked for again as well
