"""A chat server that answers as a script says: real HTTP on loopback, no model.

In a test::

    async with FakeServer(["Score: 1", Reply(status=429, headers={"Retry-After": "1"})]) as server:
        ... server.url, server.requests, server.peak

The script is one answer for all requests, a list (the last one goes on), or a function of the request's number and
payload. An answer is a text, a body (a dict or list, sent as JSON) or a :class:`Reply`.

As a process: ``python -m tests.fakes.openai_server --port-file F --latency-ms 50``.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

Fault = Literal["hang", "reset", "reset_midway", "drip", "truncated_json"]
Answer = Any  # a text, a body, a Reply, or an awaitable of one
CONSTRAINTS = ("response_format", "structured_outputs", "guided_choice", "regex")


@dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
        content: of the message; None is sent as null.
        body: stands in for the whole completion; a string is sent as it is.
        fault: ``hang`` never answers, ``drip`` sends a byte per ``drip_s``, ``reset`` closes the socket unanswered,
            ``reset_midway`` after half of the body; ``truncated_json`` is half of the body as if it were all.
        usage: prompt and completion tokens.
        tool_calls: (name, JSON text of the arguments) of each call that the server parted from the text.
    """

    content: Any = "Score: 1"
    finish: str | None = "stop"
    reasoning: str | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    latency_s: float = 0.0
    fault: Fault | None = None
    drip_s: float = 1.0
    usage: tuple[int, int] | None = (100, 10)
    tool_calls: Sequence[tuple[str, str]] = ()

    def text(self, model: str, api: str = "chat") -> str:
        """The body as sent; ``api`` is chat or completions."""
        if self.body is not None:
            return self.body if isinstance(self.body, str) else json.dumps(self.body)
        return json.dumps(self._completion(model, api))

    def _completion(self, model: str, api: str) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": self.finish}
        choice |= {"message": self._message()} if api == "chat" else {"text": self.content}
        body = {"id": "chat-1", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}
        if self.usage:
            prompt, reply = self.usage
            body["usage"] = {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}
        return body

    def _message(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": f"id-{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for number, (name, arguments) in enumerate(self.tool_calls)
            ]
        return message


@dataclass(frozen=True)
class Request:
    """What came in."""

    payload: dict[str, Any]
    headers: dict[str, str]

    @property
    def prompt(self) -> str:
        """The last message."""
        return self.payload["messages"][-1]["content"]


class FakeServer:
    """The server.

    Args:
        latency_s: before every answer.
        refuses: request fields that give 400, as servers without constrained output do.
        context_chars: longer prompts give 400 as vLLM does.
        key: the bearer key; another one gives 401.
        model: the only model; another one gives 404. None takes all.
        max_model_len: said by /v1/models.
        hang_every: every such request gets no answer.

    ``active`` and ``peak`` are requests in flight now and at most, ``sockets`` the most connections open at once.
    """

    def __init__(
        self,
        script: Answer | Sequence[Answer] | Callable[[int, dict[str, Any]], Answer] = "Score: 1",
        *,
        latency_s: float = 0.0,
        refuses: Sequence[str] = (),
        context_chars: int | None = None,
        key: str | None = None,
        model: str | None = None,
        max_model_len: int | None = None,
        hang_every: int | None = None,
        keep_requests: bool = True,
    ) -> None:
        self._script, self._latency_s, self._refuses, self._context_chars = script, latency_s, refuses, context_chars
        self._key, self._model, self._max_model_len, self._hang_every = key, model, max_model_len, hang_every
        self._keep, self._runner, self._port = keep_requests, None, 0
        self.requests: list[Request] = []
        self.count = self.active = self.peak = self.sockets = 0

    @property
    def url(self) -> str:
        """Base URL, ending in /v1."""
        return f"http://127.0.0.1:{self._port}/v1"

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._port

    async def __aenter__(self) -> FakeServer:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/stats", self._stats)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=1024)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.active += 1
        self.peak = max(self.peak, self.active)
        self.sockets = max(self.sockets, len(self._runner.server.connections))
        try:
            return await self._answer(request)
        finally:
            self.active -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        payload = json.loads(await request.read())
        number, self.count = self.count, self.count + 1
        if self._keep:
            self.requests.append(Request(payload, dict(request.headers)))
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        if self._hang_every and (number + 1) % self._hang_every == 0:
            return await _faulty(request, Reply(fault="hang"), "")
        refusal = self._refusal(request, payload)
        reply = refusal or await self._scripted(number, payload)
        if reply.latency_s:
            await asyncio.sleep(reply.latency_s)
        text = reply.text(payload.get("model", ""), "completions" if "prompt" in payload else "chat")
        if reply.fault:
            return await _faulty(request, reply, text)
        return web.Response(text=text, status=reply.status, headers=reply.headers, content_type="application/json")

    async def _scripted(self, number: int, payload: dict[str, Any]) -> Reply:
        script = self._script
        if isinstance(script, list):
            answer = script[min(number, len(script) - 1)]
        else:
            answer = script(number, payload) if callable(script) else script
        answer = await answer if inspect.isawaitable(answer) else answer
        if isinstance(answer, Reply):
            return answer
        return Reply(answer) if isinstance(answer, str) else Reply(body=answer)

    def _refusal(self, request: web.Request, payload: dict[str, Any]) -> Reply | None:
        if not self._authorised(request):
            return _error(401, "Unauthorized", "AuthenticationError")
        if self._model is not None and payload.get("model") != self._model:
            return _error(404, f"The model `{payload.get('model')}` does not exist.", "NotFoundError")
        for name in self._refuses:
            if name in payload:
                return _error(400, f"[{{'type': 'extra_forbidden', 'loc': ('body', '{name}')}}]", "BadRequestError")
        size = sum(len(message["content"] or "") for message in payload.get("messages", ()))
        if self._context_chars is not None and size > self._context_chars:
            said = f"This model's maximum context length is {self._context_chars} tokens. However, you requested {size}"
            return _error(400, said, "BadRequestError")
        return None

    def _authorised(self, request: web.Request) -> bool:
        return self._key is None or request.headers.get("Authorization") == f"Bearer {self._key}"

    async def _models(self, request: web.Request) -> web.Response:
        if not self._authorised(request):
            refusal = _error(401, "Unauthorized", "AuthenticationError")
            return web.Response(text=refusal.text(""), status=401, content_type="application/json")
        entry: dict[str, Any] = {"id": self._model or "fake", "object": "model", "owned_by": "tests"}
        if self._max_model_len:
            entry["max_model_len"] = self._max_model_len
        return web.json_response({"object": "list", "data": [entry]})

    async def _stats(self, _: web.Request) -> web.Response:
        return web.json_response({name: getattr(self, name) for name in ("count", "active", "peak", "sockets")})


async def _faulty(request: web.Request, reply: Reply, text: str) -> web.StreamResponse:
    if reply.fault == "hang":
        await asyncio.sleep(3600)
    if reply.fault == "truncated_json":
        return web.Response(text=text[: len(text) // 2], status=reply.status, content_type="application/json")
    if reply.fault == "reset":
        request.transport.abort()
        return web.Response()
    response = web.StreamResponse(status=reply.status, headers={"Content-Length": str(len(text.encode()))})
    await response.prepare(request)
    if reply.fault == "reset_midway":
        await response.write(text.encode()[: len(text) // 2])
        request.transport.abort()
        return response
    for byte in text.encode():
        await response.write(bytes([byte]))
        await asyncio.sleep(reply.drip_s)
    return response


def _error(status: int, message: str, kind: str) -> Reply:
    body = {"error": {"object": "error", "message": message, "type": kind, "param": None, "code": status}}
    return Reply(status=status, body=body)


async def _serve(args: argparse.Namespace) -> None:
    server = FakeServer(
        args.content,
        latency_s=args.latency_ms / 1000,
        refuses=CONSTRAINTS if args.no_constraints else (),
        context_chars=args.context_chars,
        key=args.key,
        model=args.model,
        max_model_len=args.max_model_len,
        hang_every=args.hang_every,
        keep_requests=False,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with server:
        written = Path(f"{args.port_file}.part")
        written.write_text(str(server.port))
        written.rename(args.port_file)
        await stop.wait()


def main() -> None:
    """Serve until SIGTERM; the port stands in the port file once the server listens."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--content", default='{"reason": "nothing is missing", "verdict": 1}')
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--hang-every", type=int, help="every such request gets no answer")
    parser.add_argument("--no-constraints", action="store_true", help="refuse structured output")
    parser.add_argument("--context-chars", type=int)
    parser.add_argument("--key")
    parser.add_argument("--model")
    parser.add_argument("--max-model-len", type=int)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
