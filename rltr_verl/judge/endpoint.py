"""Checker behind OpenAI-compatible chat servers: N votes per trajectory, each a request of its own.

A vote asks for a verdict, once more at another seed if the reply holds none. A vote that fails is None, and fewer than
``min_votes`` readable ones leave the trajectory unscored. All votes on a trajectory end at one deadline, waits for a
slot and retries included. If the server says that the prompt is longer than its context, the record is rendered once
more with half of the room.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

from rltr_verl.config import JudgeSettings
from rltr_verl.errors import ConfigError, Unscored
from rltr_verl.judge.asking import open_client, sampling_fields
from rltr_verl.judge.base import Checker, Vote, Votes
from rltr_verl.judge.guards import deterministic_verdict
from rltr_verl.judge.pacing import Paced
from rltr_verl.judge.probe import served_context
from rltr_verl.judge.prompting import fit, load_prompt, load_prompt_file, new_token, placeholder_messages
from rltr_verl.judge.replies import ChatFailed, ChatReply, shortened
from rltr_verl.judge.structured import StructuredOutput
from rltr_verl.judge.verdict import read_reply
from rltr_verl.trajectory import Trajectory

_LOG = logging.getLogger(__name__)
_NOTHING = "no call succeeded"
_TELLING = 24  # characters: two sampled replies of this length are hardly ever the same


class Cache(Protocol):
    """Verdicts by key; see :class:`rltr_verl.judge.cache.VerdictCache`."""

    def key(
        self,
        *,
        model: str | None,
        prompt_version: str,
        sampling: Mapping[str, Any],
        vote: int,
        messages: list[dict[str, str]],
    ) -> str: ...

    def get(self, key: str) -> dict[str, Any] | None: ...

    def put(self, key: str, value: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Budget(Protocol):
    """What may be spent; see :class:`rltr_verl.judge.budget.Budget`."""

    def check(self) -> None: ...

    def add(self, prompt_tokens: int, completion_tokens: int) -> float: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Hosted:
    """A judge that verl serves: the router's address ("host:port" or a URL) and the model's name there."""

    url: str
    model: str

    @property
    def base_url(self) -> str:
        """The address with scheme and path, as a chat client needs it."""
        url = self.url.strip()
        if "://" not in url:
            url = f"http://{_bracketed(url)}"
        return url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"


@dataclass
class _Question:
    """What is asked about one trajectory, and until when.

    ``identity`` are the first messages without what is random in them: seeds and cache keys come from it.
    """

    trajectory: Trajectory
    token: str
    deadline: float
    limit: int | None
    messages: list[dict[str, str]]
    identity: list[dict[str, str]]
    shrunk: bool = False
    refusal: Unscored | None = None
    replies: list[str] = field(default_factory=list)
    failures: list[ChatFailed] = field(default_factory=list)


@dataclass
class _Tally:
    """What a vote has taken so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0


class EndpointChecker(Checker):
    """Asks ``settings.model`` at ``settings.base_urls`` for ``n_votes`` votes.

    ``concurrency`` bounds the requests in flight over all processes of the node that ask the same URLs, and with them
    the open sockets. Identical questions at the same time are asked once, where there is a cache.

    Args:
        cache: verdicts on disk; without one every vote is a request.
        budget: what may be spent; without one there is no limit and costs are 0.

    Raises:
        ConfigError: ``api_key_env`` names a variable that is not set, or the prompt cannot be read.
    """

    def __init__(self, settings: JudgeSettings, *, cache: Cache | None = None, budget: Budget | None = None) -> None:
        self._settings, self._cache, self._budget = settings, cache, budget
        self._prompt = (
            load_prompt_file(settings.prompt) if settings.prompt else load_prompt("completeness", settings.language)
        )
        self._structured = StructuredOutput(settings.structured, settings.thinking, settings.extra_body)
        self._slots, self._client = open_client(settings)
        self._sampling = sampling_fields(settings)
        self._flights = _SingleFlight()
        self._pace = Paced[_Question]()
        self._served: asyncio.Future[int | None] | None = None
        self._warned = False
        if settings.temperature == 0 and settings.n_votes > 1:
            self._warn("at temperature 0")

    async def check(self, trajectory: Trajectory, row: Mapping[str, Any]) -> Votes:
        """See :class:`Checker`; no reference is needed, and of the row only an empty list of needs matters.

        A trajectory that gathered nothing gets one vote of 0 and no request; see :mod:`rltr_verl.judge.guards`.
        """
        if deterministic_verdict(trajectory, row, self._settings.no_call) is not None:
            return Votes((Vote(0.0, reason=_NOTHING),), {"judge": "none asked", "judge_votes": []})
        limit = await self._context()
        question = await self._pace.run(lambda: self._ask_about(trajectory, limit))
        votes = await (self._one_by_one(question) if self._settings.early_stop else self._all_at_once(question))
        self._notice_copies(question)
        shown = [_shown(vote) for vote in votes]
        result = Votes(votes, {"prompt": self._prompt.version, "judge": self._settings.model, "judge_votes": shown})
        if len(result.readable) < self._settings.min_votes:
            raise question.refusal or self._unscored(result, question.failures)
        return result

    async def close(self) -> None:
        """Close the connections, and free the slots."""
        await self._client.close()
        self._slots.close()
        for store in (self._cache, self._budget):
            if store is not None:
                store.close()

    async def _context(self) -> int | None:
        """Context length of the judge in tokens: the setting, else what the servers say, asked once."""
        settings = self._settings
        if settings.context_tokens is not None or settings.cache.mode == "replay":
            return settings.context_tokens
        if self._served is None:
            self._served = asyncio.ensure_future(served_context(settings))
        return await asyncio.shield(self._served)

    def _ask_about(self, trajectory: Trajectory, limit: int | None) -> _Question:
        token = new_token()
        messages = self._render(trajectory, token, limit, self._settings.max_record_chars)
        deadline = asyncio.get_running_loop().time() + self._settings.deadline_s
        return _Question(trajectory, token, deadline, limit, messages, placeholder_messages(messages, token))

    def _render(self, trajectory: Trajectory, token: str, limit: int | None, room: int) -> list[dict[str, str]]:
        return fit(trajectory, self._prompt, limit, self._settings.max_tokens, room, token)

    async def _all_at_once(self, question: _Question) -> tuple[Vote, ...]:
        numbers = range(self._settings.n_votes)
        return tuple(await asyncio.gather(*(self._vote(question, number) for number in numbers)))

    async def _one_by_one(self, question: _Question) -> tuple[Vote, ...]:
        votes: list[Vote] = []
        for number in range(self._settings.n_votes):
            votes.append(await self._vote(question, number))
            if self._is_decided(votes):
                break
        return tuple(votes)

    def _is_decided(self, votes: list[Vote]) -> bool:
        """Whether the votes that are left cannot change which half the mean is in."""
        readable = [vote.verdict for vote in votes if vote.verdict is not None]
        ones, left = sum(value >= 0.5 for value in readable), self._settings.n_votes - len(votes)
        return len(readable) >= self._settings.min_votes and abs(2 * ones - len(readable)) > left

    async def _vote(self, question: _Question, number: int) -> Vote:
        """Vote ``number`` (0, 1, ...) from the cache, from the same request on its way, or from the judge."""
        if self._cache is None:
            return await self._ask(question, number)
        key = self._cache.key(
            model=self._settings.model,
            prompt_version=self._prompt.version,
            sampling={**self._sampling, "structured": self._settings.structured},
            vote=number,
            messages=question.identity,
        )
        stored = self._cache.get(key)
        if stored is not None:
            return Vote(stored["verdict"], stored.get("reason"), cached=True)
        return await self._flights.run(key, lambda: self._ask_and_store(question, number, key))

    async def _ask_and_store(self, question: _Question, number: int, key: str) -> Vote:
        vote = await self._ask(question, number)
        if vote.verdict is not None and self._cache is not None:
            self._cache.put(key, {"verdict": vote.verdict, "reason": vote.reason})
        return vote

    async def _ask(self, question: _Question, number: int) -> Vote:
        """A vote by request: with another seed, up to ``verdict_retries`` times, while no verdict can be read."""
        tally, started = _Tally(), asyncio.get_running_loop().time()
        seed = _seed(question.identity) + number
        for attempt in range(self._settings.verdict_retries + 1):
            vote, again = await self._try(question, seed + attempt * self._settings.n_votes, tally)
            if not again:
                break
        return replace(vote, latency_s=asyncio.get_running_loop().time() - started, **vars(tally))

    async def _try(self, question: _Question, seed: int, tally: _Tally) -> tuple[Vote, bool]:
        """A vote from one seed, and whether another seed may do better."""
        try:
            reply = await self._reply(question, seed, tally)
        except ChatFailed as error:
            question.failures.append(error)
            return Vote(None, failure=str(error)), error.kind == "cut_off"
        except Unscored as refusal:
            question.refusal = refusal
            return Vote(None, failure=refusal.problem), False
        verdict, reason = read_reply(reply.content, reply.reasoning)
        if verdict is None:
            return Vote(None, failure=f"no readable verdict in {shortened(reply.content)}", unreadable=True), True
        question.replies.append(reply.content)
        return Vote(verdict, reason), False

    async def _reply(self, question: _Question, seed: int, tally: _Tally) -> ChatReply:
        """A reply to the question, asked again where the server refuses the constraint or the length."""
        while True:
            if self._budget is not None:
                self._budget.check()
            messages = question.messages
            payload = {**self._sampling, "model": self._settings.model, "messages": messages, "seed": seed % 2**31}
            try:
                reply = await self._client.complete(payload, deadline=question.deadline, fields=self._structured.fields)
            except ChatFailed as failure:
                self._count(tally, failure)
                if self._structured.refused(failure) or self._shrunk(question, messages, failure):
                    continue
                raise
            self._count(tally, reply)
            return reply

    def _shrunk(self, question: _Question, sent: list[dict[str, str]], failure: ChatFailed) -> bool:
        """Whether there is a shorter prompt than the one that the server refused as too long."""
        if failure.kind != "context_overflow":
            return False
        if not question.shrunk:
            question.shrunk = True
            room = min(self._settings.max_record_chars, len(sent[-1]["content"])) // 2
            question.messages = self._render(question.trajectory, question.token, question.limit, room)
        return question.messages != sent

    def _count(self, tally: _Tally, reply: ChatReply | ChatFailed) -> None:
        tally.prompt_tokens += reply.prompt_tokens
        tally.completion_tokens += reply.completion_tokens
        if self._budget is not None and (reply.prompt_tokens or reply.completion_tokens):
            tally.cost += self._budget.add(reply.prompt_tokens, reply.completion_tokens)

    def _notice_copies(self, question: _Question) -> None:
        replies = question.replies
        if len(replies) > 1 and len(set(replies)) == 1 and len(replies[0]) >= _TELLING:
            self._warn("since the server answers different seeds with the same text")

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            message = "rltr.judge: %s the %d votes of a trajectory are one vote. Fix: %s"
            fix = "rltr.judge.n_votes=1 (and min_votes=1), or a rltr.judge.temperature above 0 that the server heeds."
            _LOG.warning(message, why, self._settings.n_votes, fix)

    def _unscored(self, votes: Votes, failures: list[ChatFailed]) -> Unscored:
        found, asked = len(votes.readable), self._settings.n_votes
        reasons = "; ".join(dict.fromkeys(vote.failure for vote in votes.votes if vote.failure))
        fix = f"{_advice(votes, failures)}; rltr.judge.min_votes sets how many suffice."
        where = f"judge {', '.join(self._settings.base_urls)}"
        return Unscored(f"{found} of {asked} votes are readable ({reasons})", where=where, fix=fix)


class _SingleFlight:
    """The same question asked twice at once is one request."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[Vote | None]] = {}

    async def run(self, key: str, ask: Callable[[], Awaitable[Vote]]) -> Vote:
        """What ``ask`` gives, or what the one that is already on its way gives (as a cached vote)."""
        while key in self._running:
            vote = await asyncio.shield(self._running[key])
            if vote is not None:
                return replace(vote, latency_s=0.0, prompt_tokens=0, completion_tokens=0, cost=0.0, cached=True)
        future = self._running[key] = asyncio.get_running_loop().create_future()
        result = None
        try:
            result = await ask()
            return result
        finally:  # None tells those who wait that this one was cancelled, and to ask themselves
            del self._running[key]
            if not future.done():
                future.set_result(result)


def hosted_settings(settings: JudgeSettings, hosted: Hosted | None) -> JudgeSettings:
    """``settings`` with the URL and the model of the judge that verl serves.

    Raises :class:`ConfigError` if verl serves none.
    """
    if hosted is None or not hosted.url or not hosted.model:
        fix = "set reward.reward_model.enable=true and reward.reward_model.model_path, or use judge=endpoint."
        raise ConfigError("verl serves no reward model that could judge", where="rltr.judge.backend=hosted", fix=fix)
    return settings.model_copy(update={"base_url": hosted.base_url, "model": hosted.model})


def _bracketed(address: str) -> str:
    """``address`` with an IPv6 host in brackets, as URLs want it."""
    host, _, port = address.rpartition(":")
    try:
        return f"[{ipaddress.IPv6Address(host)}]:{port}"
    except ValueError:
        return address


def _advice(votes: Votes, failures: list[ChatFailed]) -> str:
    """What to look at, by how the votes were lost."""
    if any(failure.status in (401, 403) for failure in failures):
        return "export the server's key in a variable and name that by rltr.judge.api_key_env"
    if any(vote.unreadable for vote in votes.votes) or any(failure.kind == "cut_off" for failure in failures):
        room = "give replies more room (rltr.judge.max_tokens; a model that thinks needs thousands)"
        return f"{room}, or a form that the server holds to (rltr.judge.structured=json_schema or choice)"
    return "check that the server answers, and the model's name"


def _seed(messages: list[dict[str, str]]) -> int:
    """Seed of the first vote: the same prompt is asked with the same seeds in every run."""
    return int.from_bytes(hashlib.sha256(messages[-1]["content"].encode()).digest()[:4], "big")


def _shown(vote: Vote) -> dict[str, Any]:
    """The vote for the dump, without what is absent or 0; the verdict is always there."""
    values = {item.name: getattr(vote, item.name) for item in fields(vote)}
    return {name: value for name, value in values.items() if name == "verdict" or value}
