"""Rest, slots, cache and figures of a tool."""

from __future__ import annotations

import asyncio

import pytest

from rltr_verl.tool_guard import Breaker, Gate, ResultCache, ToolStats
from rltr_verl.trajectory import Status


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def note(breaker: Breaker, *statuses: Status) -> None:
    for status in statuses:
        breaker.note(status)


def test_a_tool_rests_after_faults_in_a_row_and_one_more_sends_it_back():
    clock = Clock()
    breaker = Breaker("t", 3, 10.0, clock)
    note(breaker, Status.INFRASTRUCTURE, Status.TIMEOUT)
    assert not breaker.resting
    assert breaker.note(Status.INFRASTRUCTURE) and breaker.resting
    assert not breaker.note(Status.INFRASTRUCTURE)  # still under way when the rest began
    clock.now = 10.0
    assert not breaker.resting
    assert breaker.note(Status.TIMEOUT) and breaker.resting


def test_after_its_rest_one_call_tries_it_and_the_others_fail():
    clock = Clock()
    breaker = Breaker("t", 2, 10.0, clock)
    note(breaker, Status.TIMEOUT, Status.TIMEOUT)
    for status, later in ((Status.TIMEOUT, False), (Status.OK, True)):
        clock.now += 10.0
        with breaker.call() as first:
            with breaker.call() as second:
                assert first and not second
            breaker.note(status)
        with breaker.call() as third:
            assert third is later


def test_a_try_that_is_cancelled_lets_the_next_one_try():
    clock = Clock()
    breaker = Breaker("t", 1, 10.0, clock)
    note(breaker, Status.TIMEOUT)
    clock.now = 10.0
    for _ in range(2):
        with pytest.raises(asyncio.CancelledError), breaker.call() as admitted:
            assert admitted
            raise asyncio.CancelledError


def test_any_answer_ends_the_row_of_faults_and_the_rest():
    breaker = Breaker("t", 2, 10.0, Clock())
    for answer in (Status.OK, Status.BAD_ARGUMENTS, Status.TOOL_FAILED):
        note(breaker, Status.INFRASTRUCTURE, answer, Status.INFRASTRUCTURE, answer)
        assert not breaker.resting
    note(breaker, Status.TIMEOUT, Status.TIMEOUT)
    assert breaker.resting
    note(breaker, Status.OK)
    assert not breaker.resting


def test_a_gate_serves_one_event_loop_after_another_and_keeps_its_limit():
    gate, peaks, inside = Gate(2), [], []

    async def hold() -> None:
        async with gate:
            inside.append(1)
            peaks.append(len(inside))
            await asyncio.sleep(0.01)
            inside.pop()

    async def many() -> None:
        await asyncio.gather(*(hold() for _ in range(6)))

    asyncio.run(many())
    asyncio.run(many())
    assert max(peaks) == 2 and len(peaks) == 12


def test_the_cache_is_bounded_and_tells_types_apart():
    cache = ResultCache(entries=2)
    cache.put({"a": 1, "b": 2}, "one")
    assert cache.get({"b": 2, "a": 1}) == "one"
    assert cache.get({"a": "1", "b": 2}) is None and cache.get({"a": True, "b": 2}) is None
    cache.put({"a": 2}, "two")
    cache.put({"a": 3}, "three")
    assert cache.get({"a": 1, "b": 2}) is None and cache.get({"a": 3}) == "three"


def test_figures_have_the_same_names_before_and_after_calls():
    stats = ToolStats()
    empty = stats.as_dict()
    stats.add(Status.OK, 1.0)
    stats.add(Status.TIMEOUT, 3.0)
    figures = stats.as_dict()
    assert figures.keys() == empty.keys() and not any(empty.values())
    assert (figures["calls"], figures["ok"], figures["timeout"]) == (2, 1, 1)
    assert (figures["seconds_mean"], figures["seconds_max"]) == (2.0, 3.0)
