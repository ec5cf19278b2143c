"""The judge's account, shared by real processes."""

import logging
import multiprocessing
import pickle
import sqlite3
import sys
from types import SimpleNamespace

import pytest

from rltr_verl.config import BudgetSettings, CacheSettings, JudgeSettings
from rltr_verl.errors import BudgetSpent, ConfigError, Unscored
from rltr_verl.judge import budget as module
from rltr_verl.judge.budget import Budget, Spending, build_budget
from rltr_verl.judge.cache import VerdictCache

FORK = multiprocessing.get_context("fork")
PRICED = {"price_prompt": 2.0, "price_completion": 8.0}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = SimpleNamespace(value=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.value))
    return now


def opened(folder, **settings) -> Budget:
    return Budget(BudgetSettings(**settings), folder)


def test_cost_is_tokens_times_price_per_million(tmp_path):
    budget = opened(tmp_path, **PRICED)
    assert budget.add(1_000_000, 500_000) == pytest.approx(6.0)
    assert budget.add(1000, 0) == pytest.approx(0.002)
    assert budget.spent == Spending(pytest.approx(6.002), 1_001_000, 500_000, 2)


@pytest.mark.parametrize("settings", [{}, {"tokens": 10**9}, PRICED])
def test_tokens_are_counted_with_and_without_a_store(tmp_path, settings):
    budget = opened(tmp_path / "account", **settings)
    budget.add(10, 5)
    budget.add(1, 2)
    assert (budget.spent.prompt_tokens, budget.spent.completion_tokens, budget.spent.requests) == (11, 7, 2)
    assert (tmp_path / "account").exists() is bool(settings)


def test_money_spent_names_the_sum_the_limit_and_the_setting(tmp_path):
    budget = opened(tmp_path, money=0.5, **PRICED)
    budget.add(240_000, 0)
    budget.check()
    budget.add(10_000, 0)
    said = r"rltr.judge.budget.money: 0.5000 spent, the limit is 0.5. Fix: raise rltr.judge.budget.money, or delete"
    with pytest.raises(BudgetSpent, match=said) as caught:
        budget.check()
    assert isinstance(caught.value, Unscored)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), BudgetSpent)


def test_prompt_and_completion_tokens_count_together():
    budget = opened(None, tokens=1000)
    budget.add(600, 399)
    budget.check()
    budget.add(0, 1)
    with pytest.raises(BudgetSpent, match=r"budget.tokens: 1,000 tokens spent, the limit is 1,000. Fix: raise .*\.$"):
        budget.check()


def test_a_limit_of_0_allows_nothing():
    with pytest.raises(BudgetSpent):
        opened(None, tokens=0).check()


def test_without_a_limit_nothing_is_ever_spent(tmp_path):
    budget = opened(tmp_path, **PRICED)
    budget.add(10**12, 10**12)
    budget.check()


def test_the_next_run_on_the_folder_goes_on_with_the_account(tmp_path):
    first = opened(tmp_path, tokens=100, **PRICED)
    for _ in range(3):
        first.add(20, 10)
    first.close()
    second = opened(tmp_path, tokens=100, **PRICED)
    assert second.spent == first.spent == Spending(pytest.approx(3 * (40 + 80) / 1e6), 60, 30, 3)
    second.add(5, 5)
    with pytest.raises(BudgetSpent):
        second.check()


def test_the_disk_is_read_at_most_every_fifth_of_a_second(tmp_path, clock):
    mine, other = opened(tmp_path, tokens=100), opened(tmp_path, tokens=100)
    mine.check()
    other.add(100, 0)
    other.close()
    clock.value = 0.19
    mine.check()
    clock.value = 0.2
    with pytest.raises(BudgetSpent):
        mine.check()


def test_a_check_reads_while_others_write(tmp_path, clock):
    mine, other = opened(tmp_path, tokens=100), opened(tmp_path, tokens=100)
    other.add(100, 0)
    writing = sqlite3.connect(tmp_path / "cache.db", isolation_level=None)
    writing.execute("BEGIN IMMEDIATE")
    with pytest.raises(BudgetSpent):
        mine.check()


def test_what_is_not_written_yet_counts_here(tmp_path, clock):
    budget = opened(tmp_path, tokens=100)
    budget.add(60, 0)
    budget.add(40, 0)
    assert budget.spent.tokens == 100 and opened(tmp_path, tokens=100).spent.tokens == 60
    with pytest.raises(BudgetSpent):
        budget.check()


def _spend(folder, start):
    start.wait()
    budget = opened(folder, tokens=10**9, **PRICED)
    for number in range(500):
        budget.add(number, 1)
        budget._refresh_at = 0.0  # a write with every request: as many collisions as there can be
    budget.close()


def test_processes_count_together_and_lose_nothing(tmp_path):
    start = FORK.Event()
    workers = [FORK.Process(target=_spend, args=(tmp_path / "new", start)) for _ in range(4)]
    for process in workers:
        process.start()
    start.set()
    for process in workers:
        process.join(60)
    assert [process.exitcode for process in workers] == [0] * 4
    total = 4 * sum(range(500))
    money = pytest.approx((total * 2 + 2000 * 8) / 1e6)
    assert opened(tmp_path / "new", tokens=1).spent == Spending(money, total, 2000, 2000)


def test_a_busy_account_is_written_later(tmp_path, clock, caplog):
    budget = opened(tmp_path, tokens=100)
    other = sqlite3.connect(tmp_path / "cache.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    budget.add(30, 0)
    assert budget.spent.tokens == 30
    other.execute("COMMIT")
    budget.close()
    assert opened(tmp_path, tokens=100).spent.tokens == 30
    assert not caplog.records


def test_an_account_that_cannot_be_opened_is_said_and_kept_in_memory(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    budget = opened(tmp_path / "file" / "account", tokens=100)
    budget.add(60, 40)
    with pytest.raises(BudgetSpent):
        budget.check()
    assert len(caplog.records) == 1 and "Each process counts for itself" in caplog.text


def test_an_account_that_breaks_is_said_once_and_kept_in_memory(tmp_path, clock, caplog):
    budget = opened(tmp_path, tokens=100)
    budget.add(10, 0)
    with sqlite3.connect(tmp_path / "cache.db") as connection:
        connection.execute("DROP TABLE Cache")
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            clock.value = float(step)
            budget.add(25, 0)
    with pytest.raises(BudgetSpent):
        budget.check()
    assert len(caplog.records) == 1


def judge(tmp_path, mode="use", cache=True, **budget) -> JudgeSettings:
    folder = CacheSettings(dir=str(tmp_path / "cache") if cache else None, mode=mode)
    return JudgeSettings(cache=folder, budget=BudgetSettings(**budget))


def test_the_account_lies_in_the_cache_folder(tmp_path):
    build_budget(judge(tmp_path, tokens=10)).add(1, 1)
    assert (tmp_path / "cache" / "rltr_budget").is_dir()
    VerdictCache(judge(tmp_path).cache).close()  # a folder with only an account is still a place for a cache
    assert build_budget(judge(tmp_path, tokens=10)).spent.tokens == 2


def test_replay_costs_nothing_and_writes_nothing(tmp_path):
    build_budget(judge(tmp_path, mode="replay", tokens=10)).check()
    assert not (tmp_path / "cache").exists()


def test_without_a_cache_the_workers_of_a_ray_job_share_a_temporary_account(tmp_path, monkeypatch):
    context = SimpleNamespace(get_job_id=lambda: "01000000", get_node_id=lambda: "ab12")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    build_budget(judge(tmp_path, cache=False, tokens=10)).add(1, 1)
    assert build_budget(judge(tmp_path, cache=False, tokens=10)).spent.tokens == 2
    context.get_job_id = lambda: "02000000"
    assert build_budget(judge(tmp_path, cache=False, tokens=10)).spent.tokens == 0


def test_without_a_cache_and_ray_the_process_counts_for_itself(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    build_budget(judge(tmp_path, cache=False, tokens=10)).add(1, 1)
    assert build_budget(judge(tmp_path, cache=False, tokens=10)).spent.tokens == 0


def test_a_limit_on_money_needs_a_price(tmp_path):
    with pytest.raises(ConfigError, match="rltr.judge.budget.money: a limit on money needs prices.*price_prompt"):
        build_budget(judge(tmp_path, money=5.0))
    build_budget(judge(tmp_path, money=5.0, price_completion=1.0))
