"""A small HTTP face of the rollout server: OpenAI chat completions, for a judge that verl hosts and for a look by hand.

Rollouts do not come this way; they speak token ids over Ray.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict

from rltr_verl.errors import RltrError

_PASSED_ON = ("temperature", "top_p", "top_k", "stop", "seed", "stop_token_ids")


class ChatRequest(BaseModel):
    """The fields that are read; others that clients send by habit are refused by name."""

    model_config = ConfigDict(extra="forbid")

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    n: int = 1
    stream: bool = False
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def build_app(server: Any, tokenizer: Any, model_name: str) -> FastAPI:
    """Routes ``/health``, ``/v1/models`` and ``/v1/chat/completions`` in front of a ``TransformersServer``."""
    app = FastAPI(title="rltr_verl transformers rollout")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return await server.get_status()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model_name, "object": "model", "owned_by": "rltr_verl"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> dict[str, Any]:
        if request.stream:
            raise HTTPException(400, "this server does not stream; send stream=false")
        prompt = _prompt_ids(tokenizer, request)
        try:
            outputs = await asyncio.gather(
                *[
                    server.generate(prompt, _sampling_params(request, index), f"chatcmpl-{uuid.uuid4().hex}")
                    for index in range(request.n)
                ]
            )
        except RltrError as error:
            raise HTTPException(400, str(error)) from error
        return _response(tokenizer, model_name, len(prompt), outputs)

    return app


def _prompt_ids(tokenizer: Any, request: ChatRequest) -> list[int]:
    text = tokenizer.apply_chat_template(
        request.messages,
        tools=request.tools,
        add_generation_prompt=True,
        tokenize=False,
        **(request.chat_template_kwargs or {}),
    )
    return tokenizer.encode(text, add_special_tokens=False)


def _sampling_params(request: ChatRequest, index: int) -> dict[str, Any]:
    params = {key: getattr(request, key) for key in _PASSED_ON if getattr(request, key) is not None}
    if request.seed is not None:
        params["seed"] = request.seed + index
    limit = request.max_completion_tokens or request.max_tokens
    return {**params, **({"max_tokens": limit} if limit is not None else {})}


def _response(tokenizer: Any, model_name: str, n_prompt: int, outputs: list[Any]) -> dict[str, Any]:
    n_output = sum(len(output.token_ids) for output in outputs)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": tokenizer.decode(output.token_ids, skip_special_tokens=True),
                },
                "finish_reason": output.extra_fields["finish_reason"],
            }
            for index, output in enumerate(outputs)
        ],
        "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_output, "total_tokens": n_prompt + n_output},
    }
