"""An event loop in a thread."""

import asyncio
import signal
import threading

import pytest

from turnwise.errors import InfrastructureError
from turnwise.runtime.loop_thread import LoopThread

WATCHDOG_S = 60


def test_a_broken_loop_is_reported_to_every_waiter():
    """When the event loop itself breaks, calls that wait for it raise, and none waits for ever."""
    thread, started = LoopThread(), threading.Semaphore(0)

    async def wait():
        started.release()
        await asyncio.Event().wait()

    def break_loop():
        raise MemoryError("in the loop")

    coroutines = [wait(), wait()]
    futures = [thread.submit(coroutine) for coroutine in coroutines]
    assert all(started.acquire(timeout=WATCHDOG_S) for _ in futures)
    thread.loop.call_soon_threadsafe(setattr, thread.loop, "_run_once", break_loop)

    for future in futures:
        with pytest.raises(InfrastructureError, match="the event loop broke"):
            future.result(WATCHDOG_S)
    for coroutine in coroutines:
        coroutine.close()


def test_an_interrupt_waits_for_the_end_of_what_uses_memory_of_the_caller():
    """The caller may change its memory after the interrupt."""
    thread, ended = LoopThread(), []

    async def use_memory():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(1000):
                await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        thread.call_to_end(use_memory())
    assert [True] == ended
    thread.close()
