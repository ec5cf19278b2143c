"""Work on the event loop in slices."""

import asyncio
import time

import pytest

from rltr_verl.errors import Unscored
from rltr_verl.judge.pacing import Paced


def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return seconds


async def test_others_have_their_turn_between_slices():
    turns = 0

    async def count_turns():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    paced, counting = Paced(), asyncio.create_task(count_turns())
    results = await asyncio.gather(*(paced.run(lambda: busy(0.002)) for _ in range(90)))
    counting.cancel()
    assert results == [0.002] * 90
    assert turns >= 30  # a slice of 5 ms holds three of them at most


async def test_in_order_with_errors_and_without_the_cancelled():
    paced, done = Paced(), []

    def refuse():
        raise Unscored("no room")

    first = asyncio.create_task(paced.run(lambda: done.append(1)))
    second = asyncio.create_task(paced.run(lambda: done.append(2)))
    third = asyncio.create_task(paced.run(refuse))
    fourth = asyncio.create_task(paced.run(lambda: done.append(4)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(Unscored, match="no room"):
        await third
    await asyncio.gather(first, fourth)
    assert done == [1, 2, 4] or done == [1, 4]


def test_one_event_loop_after_another():
    paced = Paced()

    async def leave_work_behind():
        asyncio.create_task(paced.run(lambda: 1))
        await asyncio.sleep(0)

    async def work():
        return await asyncio.wait_for(paced.run(lambda: 2), 60)

    asyncio.run(leave_work_behind())
    assert asyncio.run(work()) == 2
