"""The router in front of the servers of a hosted judge: what a server says comes back as it is.

verl's own answers HTTP 500 for everything that is not 200, so that a client can neither tell a request that is refused
from a fault that passes, nor read a Retry-After.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request, Response

_KEEP_ALIVE_S = 4.0
"""Below the 5 s after which the servers close an idle connection: one that is just being closed fails a request."""

_HOP = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "accept-encoding"}
_OF_THE_SERVER = _HOP | {"content-encoding", "date", "server"}


class RewardRouter:
    """Sends each request to the server with the fewest in flight; among equals its body decides, in every run alike."""

    def __init__(self, servers: Sequence[str]) -> None:
        self._in_flight = dict.fromkeys(servers, 0)
        self._session: aiohttp.ClientSession | None = None
        self.app = FastAPI(lifespan=self._lifespan)
        self.app.add_api_route("/{path:path}", self._forward, methods=["GET", "POST"])

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            self._session = session
            yield

    async def _forward(self, request: Request, path: str) -> Response:
        assert self._session is not None
        body = await request.body()
        server = self._least_loaded(body)
        self._in_flight[server] += 1
        try:
            headers = _without(request.headers, _HOP)
            async with self._session.request(request.method, f"{server}/{path}", data=body, headers=headers) as reply:
                return Response(await reply.read(), reply.status, _without(reply.headers, _OF_THE_SERVER))
        except aiohttp.ClientError as error:
            return Response(f"{server}: {type(error).__name__}: {error}", 502)
        finally:
            self._in_flight[server] -= 1

    def _least_loaded(self, body: bytes) -> str:
        least = min(self._in_flight.values())
        equals = [server for server, count in self._in_flight.items() if count == least]
        return equals[zlib.crc32(body) % len(equals)]


def _without(headers: Mapping[str, str], names: set[str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in names}


def run_router(router_ip: str, router_port: int, worker_urls: list[str]) -> None:
    """Serve until the process is ended; stands in for verl's function of this name."""
    uvicorn.run(RewardRouter(worker_urls).app, host=router_ip, port=router_port, log_level="warning")
