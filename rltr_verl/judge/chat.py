"""One pool of OpenAI-compatible chat servers that serve the same model.

A request goes to the URL with the fewest requests in flight. It is tried again, on another URL where there is one,
after a transport fault, a timeout, HTTP 408, 425, 429 or 5xx, or a body that is no chat completion; never after
another status. A body over 8 MiB is not read to its end.
Pauses grow and are jittered, or last as long as the server's Retry-After asks. A request that has no reply long after
its like is given up early and sent once more, so that the few that hang do not hold the slots of the rest.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, wait_random_exponential

from rltr_verl.judge.replies import ChatFailed, ChatReply, Kind, Read, read_finished

Fields = Callable[[str], Mapping[str, Any]]

_BACKOFF = wait_random_exponential(multiplier=0.5, max=20)
_KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn (vLLM, SGLang) closes an idle connection: one that just closed fails a request."""

_BODY_BYTES = 2**23
"""No completion is longer; what has no end would take all memory before the deadline."""


class Slots(Protocol):
    """A bound on the requests in flight."""

    async def acquire(self, deadline: float) -> None:
        """Wait for a slot; raises asyncio.TimeoutError at ``deadline`` (the running loop's clock)."""

    def release(self) -> None:
        """Give one slot back."""


@dataclass
class _Server:
    """One base URL and how it does. Times are of the loop's clock."""

    url: str
    endpoint: str
    in_flight: int = 0
    resting_until: float = 0.0
    closed_until: float = 0.0
    last_reply: float = 0.0


@dataclass
class _Call:
    """One ``complete`` over its attempts."""

    payload: Mapping[str, Any]
    deadline: float
    fields: Fields | None
    failed: set[str] = field(default_factory=set)
    attempts: int = 0
    outcome: ChatFailed | None = None


class ChatClient:
    """Chat completions from ``urls`` (each ending in /v1) over kept connections. Proxy variables are not used.

    Args:
        slots: bounds the requests in flight; without one there is no bound.
        timeout_s: deadline of one request, from its slot to the last byte of its reply.
        retries: further attempts.
        rest_s: how long a URL that failed is left alone while others work.
        path, read: of the API that is asked, and how its replies are read.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        slots: Slots | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        retries: int = 3,
        rest_s: float = 10.0,
        path: str = "/chat/completions",
        read: Read = read_finished,
    ) -> None:
        self._servers = [_Server(url, url + path) for url in urls]
        self._read = read
        self._slots, self._timeout_s, self._retries, self._rest_s = slots, timeout_s, retries, rest_s
        self._headers = {**(headers or {}), "Content-Type": "application/json"}
        self._patience = _Patience()
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, payload: Mapping[str, Any], *, deadline: float, fields: Fields | None = None) -> ChatReply:
        """The completion of ``payload``.

        Args:
            deadline: moment of the running loop's clock at which to give up, waits and retries included.
            fields: what to add to the payload for the base URL that is asked.

        Raises:
            ChatFailed: see its ``kind``.
        """
        call = _Call(payload, deadline, fields)
        try:
            return await self._attempt(call)
        except ChatFailed as failure:
            if not failure.may_pass:
                raise
            call.outcome = failure
        return await self._again(call)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _again(self, call: _Call) -> ChatReply:
        """The retries. Most requests need none, and tenacity takes as much CPU as a request itself."""
        retrying = AsyncRetrying(
            stop=lambda state: self._is_over(state, call),
            wait=lambda state: self._pause(state, call),
            retry=retry_if_exception(_may_pass),
            reraise=True,
        )
        return await retrying(self._next_attempt, call)

    async def _next_attempt(self, call: _Call) -> ChatReply:
        if call.outcome:  # the first attempt has been made
            failure, call.outcome = call.outcome, None
            raise failure
        return await self._attempt(call)

    async def _attempt(self, call: _Call) -> ChatReply:
        call.attempts += 1
        await self._enter(call)
        server = self._pick(call)
        server.in_flight += 1
        try:
            return await self._send(server, call)
        except ChatFailed as failure:
            failure.url = server.url
            call.failed.add(server.url)
            raise
        finally:
            server.in_flight -= 1
            if self._slots:
                self._slots.release()

    async def _enter(self, call: _Call) -> None:
        """Wait for a slot at a time at which some server takes requests."""
        while True:
            await self._until_open(call.deadline)
            if not self._slots:
                return
            try:
                await self._slots.acquire(call.deadline)
            except asyncio.TimeoutError:
                raise ChatFailed("deadline", "no slot was free before the deadline") from None
            if min(server.closed_until for server in self._servers) <= _now():
                return
            self._slots.release()

    async def _until_open(self, deadline: float) -> None:
        while (opens := min(server.closed_until for server in self._servers)) > _now():
            if opens >= deadline:
                raise ChatFailed("deadline", "the server asked to wait until after the deadline")
            await asyncio.sleep(_jittered(opens - _now()))

    def _pick(self, call: _Call) -> _Server:
        now = _now()
        return min(self._servers, key=lambda server: (*_unfit(server, call, now), server.in_flight, random.random()))

    async def _send(self, server: _Server, call: _Call) -> ChatReply:
        sent = call.fields(server.url) if call.fields else {}
        body = _ENCODER.encode({**call.payload, **sent}).encode("utf-8", "replace")
        started = _now()
        try:
            reply = self._read(*await self._post(server, body, call), server.url, _now() - started)
        except ChatFailed as failure:
            failure.sent = sent
            self._learn(server, failure, started)
            raise
        self._patience.add(reply.latency_s)
        server.last_reply, server.resting_until = _now(), 0.0
        return reply

    async def _post(self, server: _Server, body: bytes, call: _Call) -> tuple[int, Any, bytes]:
        seconds, kind = self._allowed(call)
        timeout = aiohttp.ClientTimeout(total=seconds, ceil_threshold=math.inf)
        is_last = call.attempts > self._retries
        try:
            with _GivingUp(lambda: math.inf if is_last else self._patience.of(call.attempts)):
                async with self._open().post(
                    server.endpoint, data=body, timeout=timeout, allow_redirects=False
                ) as reply:
                    return reply.status, reply.headers, await _body(reply)
        except asyncio.TimeoutError:
            raise ChatFailed(kind, f"no reply within {seconds:.3g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ChatFailed("transport", f"{type(error).__name__}: {error}") from None

    def _allowed(self, call: _Call) -> tuple[float, Kind]:
        """Seconds for this request, and what it means when they are over."""
        left = call.deadline - _now()
        if left <= 0:
            raise ChatFailed("deadline", "the deadline has passed")
        return (left, "deadline") if left <= self._timeout_s else (self._timeout_s, "timeout")

    def _learn(self, server: _Server, failure: ChatFailed, started: float) -> None:
        """Let a server rest that failed, and close it for as long as it asks. A slow reply among others is no sign."""
        now = _now()
        silent = failure.kind in ("timeout", "deadline") and server.last_reply < started
        if failure.kind == "transport" or (failure.status or 0) >= 500 or silent:
            server.resting_until = now + self._rest_s
        if failure.retry_after:
            server.closed_until = max(server.closed_until, now + min(failure.retry_after, self._timeout_s))

    def _pause(self, state: RetryCallState, call: _Call) -> float:
        failure = _failure(state)
        now = _now()
        if any(not any(_unfit(server, call, now)) for server in self._servers):
            return 0.0
        if failure.retry_after is not None:
            return _jittered(failure.retry_after)
        early = failure.kind == "timeout" and self._patience.of(call.attempts) < self._timeout_s
        return 0.0 if early else _BACKOFF(state)

    def _is_over(self, state: RetryCallState, call: _Call) -> bool:
        return call.attempts > self._retries or _now() + state.upcoming_sleep >= call.deadline

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                trust_env=False,
            )
        return self._session


class _Patience:
    """How long to wait for a reply: well beyond what the recent ones took, and without a bound while they are few.

    For a first attempt the larger of 3 times the median and 2 times the 99th percentile of the last 512 replies, at
    least 0.2 s; four times as long for each further one. The client leaves the last attempt its whole timeout, so a
    server that has become slow is found out: its latencies count.
    """

    _FEW, _EVERY, _LEAST_S = 64, 16, 0.2

    def __init__(self) -> None:
        self._seconds = math.inf
        self._recent: deque[float] = deque(maxlen=512)
        self._new = 0

    def of(self, attempt: int) -> float:
        """Seconds for attempt 1, 2, ..."""
        return self._seconds * 4 ** (attempt - 1)

    def add(self, latency_s: float) -> None:
        """Take a reply's latency into account."""
        self._recent.append(latency_s)
        self._new += 1
        if len(self._recent) >= self._FEW and self._new >= self._EVERY:
            self._new = 0
            ordered = sorted(self._recent)
            median, late = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
            self._seconds = max(3 * median, 2 * late, self._LEAST_S)


class _GivingUp:
    """Ends what runs inside with ChatFailed (kind ``timeout``) once it has lasted as long as ``patience`` says then.

    The time is counted in steps, each started when the one before is over, so that a stall of this process uses up one
    step: a reply that came in meanwhile is read and not given up. ``patience`` is asked at every step, since it is not
    known yet when a run's first requests are sent.
    """

    _STEPS, _LONGEST_STEP_S = 8, 0.5

    def __init__(self, patience: Callable[[], float]) -> None:
        self._patience, self._waited, self._over = patience, 0.0, False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._wait()

    def __exit__(self, kind: object, *_: object) -> None:
        if self._timer:
            self._timer.cancel()
        if kind is asyncio.CancelledError and self._over and self._was_only_us():
            raise ChatFailed("timeout", f"no reply within {self._waited:.3g} s, far longer than usual") from None

    def _wait(self) -> None:
        step = min(self._patience() / self._STEPS, self._LONGEST_STEP_S)
        self._timer = asyncio.get_running_loop().call_later(step, self._step, step)

    def _step(self, seconds: float) -> None:
        self._waited += seconds
        if self._waited < self._patience() * 0.999:  # eight eighths need not add up to the whole
            self._wait()
        elif self._task:
            self._over = True
            self._task.cancel()

    def _was_only_us(self) -> bool:
        uncancel = getattr(self._task, "uncancel", None)  # Python 3.11
        return uncancel is None or uncancel() == 0


_ENCODER = json.JSONEncoder(ensure_ascii=False)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, ChatFailed) and error.may_pass


def _failure(state: RetryCallState) -> ChatFailed:
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, ChatFailed)  # nothing else is tried again
    return error


def _unfit(server: _Server, call: _Call, now: float) -> tuple[bool, bool, bool]:
    return server.closed_until > now, server.resting_until > now, server.url in call.failed


def _jittered(seconds: float) -> float:
    """A little longer than asked, so that those who wait do not come back all at once."""
    return seconds * random.uniform(1.0, 1.1) + random.uniform(0.0, 0.05)


async def _body(reply: aiohttp.ClientResponse) -> bytes:
    """The body, if it is of a length that a completion can have."""
    parts, size = [], 0
    async for part in reply.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > _BODY_BYTES:
            raise ChatFailed("body", f"the body is longer than {_BODY_BYTES} bytes", status=reply.status)
    return b"".join(parts)
