"""Processes of a Ray cluster that handle items; nothing is written there.

An item goes to a worker as one call and comes back as one value. When a worker dies, another takes its place and
handles exactly the items that it had.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError

from rltr_verl.errors import ConfigError, RltrError

_LOG = logging.getLogger(__name__)
_DEATHS = 3
"""Workers that may die under one item, or before they have handled anything."""
_CLOSE_S = 5.0
_REACH_S = 5.0


class Handler(Protocol):
    """What works in a worker's process. What it may fail with is a value, not an exception."""

    async def handle(self, item: Any) -> Any:
        """One item."""

    async def close(self) -> None:
        """Release connections."""


Factory = Callable[[int], Handler]
"""(number of nodes) -> handler, called in the worker's process; may raise :class:`RltrError`."""


class ActorsFailed(Exception):
    """An item could not be handled because workers died; ``fatal`` says that no other can be either."""

    def __init__(self, reason: str, *, fatal: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.fatal = reason, fatal


class _Worker:
    """What runs in a worker's process."""

    def __init__(self) -> None:
        self._handler: Handler | None = None

    async def open(self, factory: Factory, nodes: int) -> RltrError | None:
        """Build the handler; returns what hinders it."""
        try:
            self._handler = factory(nodes)
        except RltrError as error:
            return error
        return None

    async def handle(self, item: Any) -> Any:
        """One item."""
        assert self._handler is not None
        return await self._handler.handle(item)

    async def pid(self) -> int:
        """The process."""
        return os.getpid()

    async def close(self) -> None:
        """Close the handler."""
        if self._handler is not None:
            await self._handler.close()


class Actors:
    """A pool of workers; belongs to one event loop.

    Args:
        address: of the cluster; ``local`` starts one here that ends with the pool, ``auto`` finds the running one.
        workers: processes; each takes one CPU of the cluster.
        factory: makes a worker's handler; must be importable on its node.
        in_flight: items under way at the same time, over all workers.

    Raises:
        ConfigError: there is no such cluster, or it has fewer CPUs than ``workers``.
    """

    def __init__(self, address: str, workers: int, factory: Factory, in_flight: int) -> None:
        self._started = _connect(address, workers)
        nodes = min(workers, sum(bool(node["Alive"]) for node in ray.nodes()))
        count = min(workers, in_flight)
        self._seats_each = math.ceil(in_flight / count)
        self._given = (factory, nodes)
        self._seats: asyncio.Queue[Any] = asyncio.Queue()
        self._broken: BaseException | None = None
        self._early_deaths = 0
        self._jobs: set[asyncio.Task[None]] = set()
        self.workers: list[Any] = []
        for _ in range(count):
            self._hire()

    async def submit(self, item: Any) -> Any:
        """What a worker's handler makes of the item.

        Raises:
            ActorsFailed: workers died under it, or die all the time.
            RltrError: the handler cannot be built.
        """
        for _ in range(_DEATHS):
            worker = await self._seat()
            try:
                found = await worker.handle.remote(item)
            except RayActorError:
                self._replace(worker)
                continue
            except asyncio.CancelledError:
                self._seats.put_nowait(worker)
                raise
            self._seats.put_nowait(worker)
            self._early_deaths = 0
            return found
        raise ActorsFailed(f"{_DEATHS} Ray workers died under it")

    async def pids(self) -> list[int]:
        """Processes of the workers."""
        return list(await asyncio.gather(*(worker.pid.remote() for worker in self.workers)))

    async def close(self) -> None:
        """Close the handlers and end the workers, and the cluster if it was started here."""
        for job in self._jobs:
            job.cancel()
        closing = [asyncio.ensure_future(worker.close.remote()) for worker in self.workers]
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_S)
        for future in closing:
            future.cancel()
        await asyncio.gather(*closing, return_exceptions=True)
        for worker in self.workers:
            _kill(worker)
        self.workers = []
        if self._started:
            ray.shutdown()

    async def _seat(self) -> Any:
        """A worker that has room for one more item."""
        worker = await self._seats.get()
        if worker is None:
            self._seats.put_nowait(None)  # for the others who wait
            raise self._broken or ActorsFailed("the pool is closed", fatal=True)
        return worker

    def _hire(self) -> None:
        kind = ray.remote(_Worker).options(
            num_cpus=1, scheduling_strategy="SPREAD", max_concurrency=self._seats_each + 8, max_restarts=0
        )
        worker = kind.remote()
        self.workers.append(worker)
        job = asyncio.get_running_loop().create_task(self._open(worker))
        self._jobs.add(job)
        job.add_done_callback(self._opened)

    async def _open(self, worker: Any) -> None:
        try:
            error = await worker.open.remote(*self._given)
        except RayActorError:
            self._replace(worker)
            return
        except RayError as other:
            cause = getattr(other, "cause", other)
            error = ActorsFailed(f"a Ray worker cannot start: {_first_line(cause)}", fatal=True)
        if error is not None:
            self._break(error)
            return
        for _ in range(self._seats_each):
            self._seats.put_nowait(worker)

    def _opened(self, job: asyncio.Task[None]) -> None:
        self._jobs.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            self._break(error)

    def _replace(self, worker: Any) -> None:
        """Another worker for one that has died; its seats go with it."""
        if worker not in self.workers:
            return  # another of its items has seen to it
        self.workers.remove(worker)
        _kill(worker)  # in case that it is only out of reach
        self._early_deaths += 1
        if self._early_deaths > _DEATHS * max(1, len(self.workers) + 1):
            self._break(ActorsFailed("the Ray workers die before they have done anything", fatal=True))
            return
        _LOG.warning("A Ray worker died; another one does its work again.")
        self._hire()

    def _break(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._seats.put_nowait(None)


def share(concurrency: int, nodes: int) -> int:
    """Each node's part of the requests in flight; on a node the workers share it (:class:`NodeSlots`)."""
    return max(1, concurrency // max(1, nodes))


def _connect(address: str, workers: int) -> bool:
    """Join or start the cluster; True if this process was not part of one before."""
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # spares a warning
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    local: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False}
    try:
        _reach(address)
        ray.init(address=address, **quiet, **(local if address == "local" else {}))
    except (OSError, ValueError, RuntimeError) as error:
        fix = "start a cluster (ray start --head), check the address, or use --ray local."
        raise ConfigError(f"no Ray cluster there ({_first_line(error)})", where=f"--ray {address}", fix=fix) from None
    have = int(ray.cluster_resources().get("CPU", 0))
    if have < workers:
        ray.shutdown()
        problem = f"the cluster has {have} CPUs, and each of {workers} workers takes one"
        raise ConfigError(problem, where="--ray-workers", fix="ask for fewer workers, or add nodes.")
    return True


def _reach(address: str) -> None:
    """Raise OSError if nothing listens at host:port; Ray would look for it for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()


def _kill(worker: Any) -> None:
    with suppress(RayError, ValueError):
        ray.kill(worker)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
