"""Is the judge there? Asked in the driver before Ray starts, so that no GPU waits for a wrong URL, key or model name.

Every URL is asked for its list of models. A server that has no such list gets a completion of a few tokens instead; so
does one that we have a key for, since some services list their models to anyone. Proxy variables of the environment are
not used, here as in training.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from rltr_verl.config import JudgeSettings
from rltr_verl.errors import ConfigError

_URL, _KEY, _MODEL = "rltr.judge.base_url", "rltr.judge.api_key_env", "rltr.judge.model"
_TIMEOUT_S = 20.0
_QUICK_S = 5.0
_ATTEMPTS, _PAUSE_S = 3, 0.5
_NO_LIST = (404, 405, 501)
_CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "max_context_length")


@dataclass(frozen=True)
class ProbeResult:
    """What the servers say of themselves.

    Attributes:
        context_tokens: context length of the model, prompt and reply together; the smallest over all URLs, None if no
            server tells it (vLLM and SGLang do).
        models: names that every URL with a list offers, in the order of the first; empty if no server has a list.
    """

    context_tokens: int | None
    models: tuple[str, ...]


@dataclass(frozen=True)
class _Reply:
    status: int
    text: str
    location: str | None = None

    @property
    def body(self) -> Any:
        """The JSON value; None if the text is none."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    def __str__(self) -> str:
        line = " ".join(self.text.split())
        said = f": {line if len(line) <= 200 else line[:197] + '...'}" if line else ""
        return f"HTTP {self.status}{said}"


class _Unreachable(Exception):
    """No reply at all, or one that says that the server is not ready."""


def probe(settings: JudgeSettings) -> ProbeResult:
    """Ask every URL of ``rltr.judge.base_url`` once, all at the same time. Also works where an event loop runs.

    A server that is not reached or answers 5xx is asked three times; 429 counts as reached.

    Raises:
        ConfigError: for the first URL with a fault: not reachable, not an OpenAI-compatible API (a web page, a missing
            /v1, a redirect), the key is missing or refused, the model is not on the server's list, or the context is
            shorter than the settings need.
    """
    headers = auth_headers(settings.api_key_env)
    with ThreadPoolExecutor(1) as pool:
        cards = pool.submit(asyncio.run, _ask_all(settings, headers)).result()
    result = _summary(cards, settings)
    _check_room(result.context_tokens, settings)
    return result


def auth_headers(key_variable: str | None) -> dict[str, str]:
    """The header with the key from the environment; none if no variable is named.

    Raises :class:`ConfigError` if the variable is not set or holds what cannot be sent as a header.
    """
    if key_variable is None:
        return {}
    key = os.environ.get(key_variable, "").strip()
    if not key:
        fix = f"export {key_variable}=..., or set {_KEY}=null."
        raise ConfigError(f"the variable {key_variable} is not set", where=_KEY, fix=fix)
    if not key.isascii() or not key.isprintable():
        fix = f"export {key_variable} again, without line breaks or quotation marks of a text program."
        raise ConfigError(f"the variable {key_variable} holds characters that no key has", where=_KEY, fix=fix)
    return {"Authorization": f"Bearer {key}"}


async def served_context(settings: JudgeSettings) -> int | None:
    """Context length in tokens, as the servers' lists of models tell it (the smallest); None where none does.

    Not asked for more than a few seconds; a server that cannot be asked now is no error here.
    """
    timeout = aiohttp.ClientTimeout(total=_QUICK_S)
    headers = auth_headers(settings.api_key_env)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=False) as session:
        lists = [_Server(session, url, settings).listed() for url in settings.base_urls]
        found = await asyncio.gather(*lists)
    return _summary(found, settings).context_tokens


Cards = list[Mapping[str, Any]]  # the models of one server, as it describes them


async def _ask_all(settings: JudgeSettings, headers: Mapping[str, str]) -> list[Cards]:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, trust_env=False) as session:
        servers = [_Server(session, url, settings) for url in settings.base_urls]
        found = await asyncio.gather(*(server.models() for server in servers), return_exceptions=True)
    return [_raised(one) for one in found]


def _raised(found: Cards | BaseException) -> Cards:
    if isinstance(found, BaseException):
        raise found
    return found


class _Server:
    """One base URL."""

    def __init__(self, session: aiohttp.ClientSession, url: str, settings: JudgeSettings) -> None:
        self._session, self._url, self._settings = session, url, settings

    async def models(self) -> Cards:
        """The server's list; empty if it has none and completes instead."""
        _require_url(self._url)
        reply = await self._request("GET", "/models")
        cards = _cards(reply) if reply.status == 200 else None
        if cards:
            _require_model(self._settings.model or "", cards, self._url)
            await self._try_key()
            return cards
        if reply.status not in (200, 429, *_NO_LIST) or _is_page(reply):
            raise self._refused(reply)
        await self._complete()
        return []

    async def listed(self) -> Cards:
        """The server's list; empty if it has none or does not answer at once."""
        try:
            return _cards(await self._once("GET", "/models", None)) or []
        except _Unreachable:
            return []

    async def _try_key(self) -> None:
        if self._settings.api_key_env is not None:
            reply = await self._completion()
            if reply.status in (401, 403):
                raise self._refused(reply)

    async def _complete(self) -> None:
        reply = await self._completion()
        completed = isinstance(reply.body, dict) and reply.body.get("choices")
        if reply.status != 429 and not (reply.status == 200 and completed):
            raise self._refused(reply)

    async def _completion(self) -> _Reply:
        settings = self._settings
        message = {"role": "user", "content": "Say 1."}
        body = {"model": settings.model, "messages": [message], "max_tokens": 16, **settings.extra_body}
        return await self._request("POST", "/chat/completions", body)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> _Reply:
        retrying = AsyncRetrying(
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_fixed(_PAUSE_S),
            retry=retry_if_exception_type(_Unreachable),
            reraise=True,
        )
        try:
            return await retrying(self._once, method, path, body)
        except _Unreachable as error:
            raise _unreachable(self._url, str(error)) from None

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> _Reply:
        try:
            async with self._session.request(method, self._url + path, json=body, allow_redirects=False) as response:
                text = (await response.read()).decode("utf-8", "replace")
                reply = _Reply(response.status, text, response.headers.get("Location"))
        except asyncio.TimeoutError:
            raise _Unreachable(f"no reply within {_TIMEOUT_S:g} s") from None
        except aiohttp.ClientError as error:
            raise _Unreachable(f"{type(error).__name__}: {error}") from None
        if reply.status >= 500 and reply.status != 501:
            raise _Unreachable(f"it answers {reply}")
        return reply

    def _refused(self, reply: _Reply) -> ConfigError:
        """Why this reply is not one of a judge."""
        if reply.status in (401, 403):
            return _wrong_key(self._url, reply, self._settings.api_key_env)
        if 300 <= reply.status < 400:
            fix = f"set {_URL} to where it leads: {reply.location}"
            return ConfigError(f"'{self._url}' redirects (HTTP {reply.status})", where=_URL, fix=fix)
        if _is_page(reply):
            problem = f"'{self._url}' answers with a web page, not as an OpenAI-compatible API"
            return ConfigError(problem, where=_URL, fix=_url_fix(self._url))
        if reply.status in _NO_LIST and _url_fault(self._url):
            return ConfigError(f"'{self._url}' answers {reply}", where=_URL, fix=_url_fix(self._url))
        fix = f"{_url_fix(self._url)} Check {_MODEL} ('{self._settings.model}') and rltr.judge.extra_body, too."
        return ConfigError(f"'{self._url}' does not complete chats ({reply})", where=_URL, fix=fix)


def _require_url(url: str) -> None:
    if not _is_url(url):
        shown = url.rpartition("@")[2]  # what stands before an @ may be a password
        fix = "write it like http://127.0.0.1:8000/v1, without user, query or spaces; a key goes by api_key_env."
        raise ConfigError(f"'{shown}' is not the http(s) URL of an API", where=_URL, fix=fix)


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        port = parts.port
    except ValueError:
        return False
    plain = not (parts.username or parts.query or parts.fragment or any(char.isspace() for char in url))
    return plain and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0


def _cards(reply: _Reply) -> Cards | None:
    """Models of a list as OpenAI writes it, or of a bare one; None if the reply is neither."""
    listed = reply.body.get("data") if isinstance(reply.body, dict) else reply.body
    if not isinstance(listed, list):
        return None
    return [card for card in listed if isinstance(card, dict) and isinstance(card.get("id"), str)]


def _card_of(model: str, cards: Cards) -> Mapping[str, Any] | None:
    """The model's own card. Google lists ``models/NAME``, Ollama ``NAME:latest``; both also answer to NAME."""
    by_name = {card["id"]: card for card in cards}
    return next((by_name[name] for name in (model, f"models/{model}", f"{model}:latest") if name in by_name), None)


def _require_model(model: str, cards: Cards, url: str) -> None:
    if _card_of(model, cards) is not None:
        return
    names = [card["id"] for card in cards]
    close = _nearest(model, names)
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    fix = f"did you mean '{close}'?" if close else f"the server has: {shown}."
    raise ConfigError(f"'{url}' does not serve the model '{model}'", where=_MODEL, fix=fix)


def _nearest(model: str, names: list[str]) -> str | None:
    """The name most like it, upper or lower case and the owner in front of a slash left aside."""
    plain = {name.lower().rpartition("/")[2]: name for name in reversed(names)}
    close = difflib.get_close_matches(model.lower().rpartition("/")[2], plain, n=1)
    return plain[close[0]] if close else None


def _wrong_key(url: str, reply: _Reply, key_variable: str | None) -> ConfigError:
    if key_variable is None:
        fix = f"export the key in a variable and name it: {_KEY}=VARIABLE."
        return ConfigError(f"'{url}' wants a key ({reply})", where=_KEY, fix=fix)
    fix = f"correct the key in {key_variable}, and see that it may use the model."
    return ConfigError(f"'{url}' refuses the key in {key_variable} ({reply})", where=_KEY, fix=fix)


def _unreachable(url: str, reason: str) -> ConfigError:
    fix = "start the server, or correct scheme, host and port" + _proxy_hint(url) + "."
    return ConfigError(f"'{url}' cannot be reached ({reason})", where=_URL, fix=fix)


def _proxy_hint(url: str) -> str:
    """What to say where other programs would have taken a proxy to this URL."""
    parts = urlsplit(url)
    proxies = getproxies_environment()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass_environment(parts.hostname or "", proxies):
        return ""
    name = next(key for key in os.environ if key.lower() in (f"{parts.scheme}_proxy", "all_proxy"))
    return f"; {name} is set, but the judge is always asked directly, so the host must be reachable without a proxy"


def _url_fault(url: str) -> bool:
    path = urlsplit(url).path.rstrip("/")
    return path.endswith(("/chat/completions", "/completions", "/models")) or "/v1" not in path


def _url_fix(url: str) -> str:
    """The URL that is probably meant."""
    for end in ("/chat/completions", "/completions", "/models"):
        if url.endswith(end):
            return f"leave '{end}' out: {_URL}={url.removesuffix(end)}"
    if "/v1" not in urlsplit(url).path:
        return f"add /v1: {_URL}={url}/v1"
    return "give the URL of an OpenAI-compatible API, ending in /v1."


def _is_page(reply: _Reply) -> bool:
    """Whether a web page came instead of an answer; an error's page is not meant."""
    return reply.status == 200 and reply.text.lstrip()[:15].lower().startswith(("<!doctype", "<html", "<head", "<?xml"))


def _summary(servers: list[Cards], settings: JudgeSettings) -> ProbeResult:
    lists = [[card["id"] for card in cards] for cards in servers if cards]
    lengths = [_context(settings.model or "", cards) for cards in servers if cards]
    known = [length for length in lengths if length is not None]
    common = [name for name in lists[0] if all(name in other for other in lists)] if lists else []
    return ProbeResult(min(known, default=None), tuple(common))


def _context(model: str, cards: Cards) -> int | None:
    """Context length on the model's card; an adapter's is that of its parent."""
    card = _card_of(model, cards)
    seen: set[str] = set()
    while card is not None and card["id"] not in seen:
        for field in _CONTEXT_FIELDS:
            value = card.get(field)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        seen.add(card["id"])
        card = _card_of(card["parent"], cards) if isinstance(card.get("parent"), str) else None
    return None


def _check_room(served: int | None, settings: JudgeSettings) -> None:
    if served is not None and settings.context_tokens is not None and settings.context_tokens > served:
        problem = f"{settings.context_tokens} tokens are more than the server's {served}"
        fix = f"set rltr.judge.context_tokens={served} or null, or serve the model with a longer context."
        raise ConfigError(problem, where="rltr.judge.context_tokens", fix=fix)
    limit = settings.context_tokens or served
    if limit is not None and settings.max_tokens >= limit:
        problem = f"a reply of {settings.max_tokens} tokens leaves no room for a prompt in {limit}"
        fix = "lower it, or serve the model with a longer context."
        raise ConfigError(problem, where="rltr.judge.max_tokens", fix=fix)
