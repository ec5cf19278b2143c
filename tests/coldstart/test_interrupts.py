"""A signal ends work between two steps of the loop, and what stood before stands again."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from rltr_verl.coldstart.interrupts import run_interruptibly

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", SIGNALS)
def test_work_is_cancelled_and_cleaned_up_before_the_interrupt_is_raised(number):
    seen = []

    async def work():
        async def busy():
            while True:
                await asyncio.sleep(0)

        try:
            os.kill(os.getpid(), number)
            await asyncio.gather(*(asyncio.ensure_future(busy()) for _ in range(3)))
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    before = [signal.getsignal(item) for item in SIGNALS]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_interruptibly(work)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        for item, handler in zip(SIGNALS, before, strict=True):
            signal.signal(item, handler)
    assert seen == ["cleaned up"]


def test_results_and_errors_pass_through():
    async def good():
        return 41

    async def bad():
        raise ValueError("41")

    assert run_interruptibly(good) == 41
    with pytest.raises(ValueError, match="41"):
        run_interruptibly(bad)


async def test_in_another_thread_signals_are_left_alone():
    async def good():
        return signal.getsignal(signal.SIGTERM)

    assert await asyncio.to_thread(run_interruptibly, good) is signal.getsignal(signal.SIGTERM)
