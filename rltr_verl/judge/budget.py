"""What the judge has cost, counted over all processes of a node, and the limit on it.

With a limit or a price the account is a small SQLite store (``diskcache``) in the cache folder, or in a temporary
folder of the Ray job if there is no cache. The account of a cache folder belongs to all runs that use the folder: a
resumed run goes on with it, and so does another run; delete ``rltr_budget`` in it to open a new one. Every node of a
run has its own account and its own limit.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from diskcache import Cache, Timeout

from rltr_verl.config import BudgetSettings, JudgeSettings
from rltr_verl.errors import BudgetSpent, ConfigError
from rltr_verl.judge.cache import open_store

_LOG = logging.getLogger(__name__)
_REFRESH_S = 0.2
_MILLION = 1_000_000


@dataclass(frozen=True)
class Spending:
    """Money in the currency of the prices, tokens as the server counts them, and the number of requests counted."""

    money: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Spending) -> Spending:
        return Spending(
            self.money + other.money,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.requests + other.requests,
        )


def build_budget(settings: JudgeSettings) -> Budget:
    """The budget that ``rltr.judge.budget`` describes.

    Raises :class:`ConfigError` for a limit on money without a price, which would limit nothing.
    """
    check_prices(settings.budget, "rltr.judge")
    return Budget(settings.budget, _folder(settings))


def check_prices(budget: BudgetSettings, node: str) -> None:
    """Raise :class:`ConfigError` for a limit on money without a price. ``node`` is the one that ``budget`` is in."""
    if budget.money is not None and not (budget.price_prompt or budget.price_completion):
        fix = f"set {node}.budget.price_prompt and price_completion (per million tokens), or money=null."
        raise ConfigError("a limit on money needs prices", where=f"{node}.budget.money", fix=fix)


class Budget:
    """Token and money account of all processes that share ``folder``; of this process alone without one.

    Amounts are added in memory and written to the shared account at most every 0.2 s, when it is also read. So a limit
    is overshot by the requests in flight and those of the last 0.2 s, over all processes; a process that is killed
    loses up to 0.2 s of its last amounts. An account that cannot be written is said once and goes on in memory.
    Without a limit and a price no store is opened.
    """

    def __init__(self, settings: BudgetSettings, folder: Path | None, node: str = "rltr.judge") -> None:
        self._settings, self._folder, self._node = settings, folder, node
        self._lock = threading.Lock()
        self._shared, self._own = Spending(), Spending()  # in the store; not yet in the store
        self._refresh_at = 0.0
        self._warned = False
        self._store = self._open() if folder is not None and _needs_store(settings) else None

    def add(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Count one request; its cost = (prompt tokens x price + completion tokens x price) / 1,000,000."""
        prices = self._settings
        cost = (prompt_tokens * prices.price_prompt + completion_tokens * prices.price_completion) / _MILLION
        with self._lock:
            self._own += Spending(cost, prompt_tokens, completion_tokens, 1)
            self._refresh()
        return cost

    def check(self) -> None:
        """Raise :class:`BudgetSpent` once as much as the limit is spent. Reads the disk at most every 0.2 s."""
        if self._settings.money is None and self._settings.tokens is None:
            return
        spent = self.spent
        if self._settings.money is not None and spent.money >= self._settings.money:
            raise self._exceeded("money", f"{spent.money:.4f}", f"{self._settings.money:g}")
        if self._settings.tokens is not None and spent.tokens >= self._settings.tokens:
            raise self._exceeded("tokens", f"{spent.tokens:,} tokens", f"{self._settings.tokens:,}")

    @property
    def spent(self) -> Spending:
        """What all processes have spent, as of at most 0.2 s ago for the others."""
        with self._lock:
            self._refresh()
            return self._shared + self._own

    def close(self) -> None:
        """Write what is still in memory and close the store."""
        with self._lock:
            self._refresh_at = 0.0
            self._refresh()
            if self._store is not None:
                self._store.close()

    def _exceeded(self, name: str, spent: str, limit: str) -> BudgetSpent:
        where = f"{self._node}.budget.{name}"
        account = f", or delete '{self._folder}' to open a new account" if self._store is not None else ""
        return BudgetSpent(f"{spent} spent, the limit is {limit}", where=where, fix=f"raise {where}{account}.")

    def _refresh(self) -> None:
        """Add what this process spent to the shared account, and read it."""
        if self._store is None or time.monotonic() < self._refresh_at:
            return
        self._refresh_at = time.monotonic() + _REFRESH_S
        try:
            self._shared = _moved(self._store, self._own)
        except Timeout:
            return
        except (OSError, sqlite3.Error) as error:
            self._store.close()
            self._warn(error)
            return
        self._own = Spending()

    def _open(self) -> Cache | None:
        assert self._folder is not None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return open_store(self._folder, cull_limit=0)
        except (OSError, sqlite3.Error, Timeout) as error:
            self._warn(error)
            return None

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            problem = "the judge's account %s cannot be used: %s. Each process counts for itself."
            _LOG.warning(problem, self._folder, error)
            self._warned = True


def _moved(store: Cache, own: Spending) -> Spending:
    """The account with ``own`` added, all at once or not at all."""
    names = [field.name for field in fields(Spending)]
    if not own.requests:
        return Spending(*(store.get(name) or 0 for name in names))
    with store.transact():
        return Spending(*(store.incr(name, getattr(own, name)) for name in names))


def _needs_store(settings: BudgetSettings) -> bool:
    limited = settings.money is not None or settings.tokens is not None
    return limited or settings.price_prompt > 0 or settings.price_completion > 0


def _folder(settings: JudgeSettings) -> Path | None:
    if settings.cache.mode == "replay":
        return None  # nothing is asked
    if settings.cache.dir is not None:
        return Path(settings.cache.dir).expanduser().absolute() / "rltr_budget"
    job = _ray_job()
    return None if job is None else Path(tempfile.gettempdir()) / f"rltr-{os.getuid()}" / f"budget-{job}"


def _ray_job() -> str | None:
    """Name of this job on this node, the same for all its workers and never used again; None outside of Ray."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return f"{context.get_job_id()}-{context.get_node_id()}"
