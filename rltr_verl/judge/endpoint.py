"""Checker behind an OpenAI-compatible chat endpoint: N votes per trajectory, each a request of its own.

A request is tried again after a transport fault, a timeout, HTTP 429 or 5xx, or a body that is no chat completion (with
the server's Retry-After, else with growing pauses); never after another 4xx. A vote that fails or holds no readable
verdict is None. Fewer than ``min_votes`` readable ones leave the trajectory unscored.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from time import time
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rltr_verl.config import JudgeSettings
from rltr_verl.errors import ConfigError, Unscored
from rltr_verl.judge.base import Checker, Vote, Votes
from rltr_verl.judge.prompting import judge_messages, load_prompt
from rltr_verl.judge.verdict import parse_verdict
from rltr_verl.trajectory import Trajectory

_LOG = logging.getLogger(__name__)
_BACKOFF = wait_random_exponential(multiplier=0.5, max=20)


class _VoteFailed(Exception):
    """A request that trying again cannot help."""


class _TryAgain(_VoteFailed):
    """A request that may succeed later; ``after`` is the server's own wish in seconds."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class EndpointChecker(Checker):
    """Asks ``rltr.judge.model`` at ``rltr.judge.base_url`` for ``n_votes`` votes at once.

    ``concurrency`` bounds the requests in flight over all trajectories, and with them the open sockets. Proxy variables
    of the environment are not used.

    Raises:
        ConfigError: ``api_key_env`` names a variable that is not set.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        self._prompt = load_prompt(settings.language)
        self._headers = _headers(settings.api_key_env)
        self._url = settings.base_urls[0] + "/chat/completions"
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(settings.concurrency)
        if settings.temperature == 0 and settings.n_votes > 1:
            _LOG.warning("rltr.judge: at temperature 0 the %d votes of a trajectory are one vote.", settings.n_votes)

    async def check(self, trajectory: Trajectory, row: Mapping[str, Any]) -> Votes:
        """See :class:`Checker`; the row is not looked at, so queries need neither reference nor needs."""
        messages = judge_messages(trajectory, self._prompt, self._settings.max_record_chars)
        seed = _seed(messages)
        votes = await asyncio.gather(*(self._vote(messages, seed + number) for number in range(self._settings.n_votes)))
        record = {
            "prompt": self._prompt.version,
            "judge": self._settings.model,
            "failed_votes": [vote.failure for vote in votes if vote.failure],
        }
        result = Votes(tuple(votes), record)
        if len(result.readable) < self._settings.min_votes:
            raise self._unscored(result)
        return result

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _vote(self, messages: list[dict[str, str]], seed: int) -> Vote:
        settings = self._settings
        payload = {
            "model": settings.model,
            "messages": messages,
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "seed": seed % 2**31,
        }
        try:
            reply = await self._ask_with_retries(payload)
        except _VoteFailed as error:
            return Vote(None, failure=str(error))
        verdict = parse_verdict(reply)
        return Vote(verdict, failure=None if verdict is not None else f"no readable verdict in {_short(reply)}")

    async def _ask_with_retries(self, payload: Mapping[str, Any]) -> str:
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._settings.retries + 1),
            wait=self._pause,
            retry=retry_if_exception_type(_TryAgain),
            reraise=True,
        )
        return await retrying(self._ask, payload)

    async def _ask(self, payload: Mapping[str, Any]) -> str:
        """One request; the visible text of the reply."""
        # The deadline starts with the slot: waiting for one is no fault of the judge.
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        async with self._slots:
            try:
                async with self._open().post(self._url, json=payload, headers=self._headers, timeout=timeout) as reply:
                    return _read(reply.status, reply.headers, await reply.read())
            except asyncio.TimeoutError:
                raise _TryAgain(f"no reply within {self._settings.timeout_s:g} s") from None
            except aiohttp.ClientError as error:
                raise _TryAgain(f"{type(error).__name__}: {error}") from None

    def _pause(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        asked = error.after if isinstance(error, _TryAgain) else None
        return _BACKOFF(state) if asked is None else min(asked, self._settings.timeout_s)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    def _unscored(self, votes: Votes) -> Unscored:
        found, asked = len(votes.readable), self._settings.n_votes
        reasons = "; ".join(dict.fromkeys(votes.record["failed_votes"]))
        fix = "check that the server answers, and the model's name and key; rltr.judge.min_votes sets how many suffice."
        return Unscored(f"{found} of {asked} votes are readable ({reasons})", where=f"judge {self._url}", fix=fix)


def _headers(key_variable: str | None) -> dict[str, str]:
    if key_variable is None:
        return {}
    key = os.environ.get(key_variable)
    if not key:
        fix = f"export {key_variable}=..., or set rltr.judge.api_key_env=null."
        raise ConfigError(f"the variable {key_variable} is not set", where="rltr.judge.api_key_env", fix=fix)
    return {"Authorization": f"Bearer {key}"}


def _seed(messages: list[dict[str, str]]) -> int:
    """Seed of the first vote: the same prompt is asked with the same seeds in every run."""
    return int.from_bytes(hashlib.sha256(messages[-1]["content"].encode()).digest()[:4], "big")


def _read(status: int, headers: Mapping[str, str], body: bytes) -> str:
    """Visible text of a chat completion. Raises for every reply that is not a finished one."""
    text = body.decode("utf-8", "replace")
    if status == 429 or status >= 500:
        raise _TryAgain(f"HTTP {status}: {_short(text)}", _retry_after(headers.get("Retry-After")))
    if status != 200:
        raise _VoteFailed(f"HTTP {status}: {_short(text)}")
    try:
        choice = json.loads(text)["choices"][0]
        content, finish = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise _TryAgain(f"the body is no chat completion: {_short(text)}") from None
    if finish == "length":
        raise _VoteFailed("the reply was cut off at max_tokens")
    return content if isinstance(content, str) else ""


def _retry_after(value: str | None) -> float | None:
    """Seconds from now; the header holds seconds or a date. None if it is absent or unreadable."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 120 else line[:117] + "...")
