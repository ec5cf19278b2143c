"""A model behind chat servers, asked within its limits: the pool, the slots of the node and the budget together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltr_verl.config import EndpointSettings
from rltr_verl.errors import ConfigError
from rltr_verl.judge.budget import Budget, Spending, check_prices
from rltr_verl.judge.chat import ChatClient
from rltr_verl.judge.probe import auth_headers
from rltr_verl.judge.replies import ChatFailed, ChatReply, Read, read_finished
from rltr_verl.judge.slots import NodeSlots


def sampling_fields(settings: EndpointSettings) -> dict[str, Any]:
    """The fields of every request that change what a reply may be."""
    body = {"temperature": settings.temperature, "max_tokens": settings.max_tokens, **settings.extra_body}
    if settings.thinking is not None:
        template = {**settings.extra_body.get("chat_template_kwargs", {}), "enable_thinking": settings.thinking}
        body["chat_template_kwargs"] = template
    return body


def open_client(
    settings: EndpointSettings, *, path: str = "/chat/completions", read: Read = read_finished
) -> tuple[NodeSlots, ChatClient]:
    """The slots of the node for these URLs, and a client within them; no connection is opened.

    Raises :class:`ConfigError` for a key variable that is not set.
    """
    urls = settings.base_urls
    slots = NodeSlots(settings.concurrency, " ".join(sorted(urls)), sockets=len(urls))
    client = ChatClient(
        urls,
        slots=slots,
        headers=auth_headers(settings.api_key_env),
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        rest_s=settings.rest_s,
        path=path,
        read=read,
    )
    return slots, client


class Endpoint:
    """The model that ``settings`` describe.

    ``concurrency`` bounds the requests in flight over all processes of the node that ask the same URLs.

    Args:
        settings: of the model.
        node: the settings' name, for messages ("rltr.teacher").
        account: folder of the budget's account, shared by all processes that use it; None: this process alone.
        path, read: see :class:`rltr_verl.judge.chat.ChatClient`.

    Raises:
        ConfigError: no URL or model, a key variable that is not set, or a budget without prices.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        node: str,
        *,
        account: Path | None = None,
        path: str = "/chat/completions",
        read: Read = read_finished,
    ) -> None:
        if not settings.base_urls or not settings.model:
            fix = f"set {node}.base_url=http://host:8000/v1 and {node}.model=NAME."
            raise ConfigError("no endpoint is named", where=node, fix=fix)
        check_prices(settings.budget, node)
        self.model = settings.model
        self._fields = {**sampling_fields(settings), "model": settings.model}
        self._budget = Budget(settings.budget, account, node)
        self._slots, self._client = open_client(settings, path=path, read=read)

    async def ask(self, payload: Mapping[str, Any], deadline: float) -> tuple[ChatReply, Spending]:
        """The reply to ``payload``, whose fields stand over those of the settings, and what it cost.

        Args:
            deadline: moment of the running loop's clock at which to give up.

        Raises:
            ChatFailed: no reply could be had.
            BudgetSpent: the budget is spent.
        """
        self._budget.check()
        try:
            reply = await self._client.complete({**self._fields, **payload}, deadline=deadline)
        except ChatFailed as failure:
            self._count(failure)
            raise
        return reply, self._count(reply)

    async def close(self) -> None:
        """Close the connections, free the slots and write the account."""
        await self._client.close()
        self._slots.close()
        self._budget.close()

    def _count(self, reply: ChatReply | ChatFailed) -> Spending:
        tokens = reply.prompt_tokens, reply.completion_tokens
        return Spending(self._budget.add(*tokens) if any(tokens) else 0.0, *tokens, 1)
