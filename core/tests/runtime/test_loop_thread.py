"""An event loop in a thread."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from turnwise.errors import InfrastructureError
from turnwise.runtime.finished import FinishedEpisodes
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
    # The loop cannot end its tasks any more. Their destruction logs an error, which belongs to no later test.
    del futures
    gc.collect()


def test_an_interrupt_waits_for_the_end_of_a_call():
    """Ctrl-C cancels the coroutine, and is raised only when the coroutine has ended."""
    thread, log = LoopThread(), []

    async def work():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            log.append("ended")

    with pytest.raises(KeyboardInterrupt):
        thread.call_to_end(work())
    log.append("raised")
    thread.close()

    assert ["ended", "raised"] == log


def interrupt_too_early():
    """
    Interrupt the main thread as a signal does that comes just before it waits.

    The signal goes to this thread, so it ends no system call of the main thread, which notices it in Python code alone.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


@pytest.mark.parametrize("how", ["call", "call_to_end"])
def test_an_interrupt_just_before_the_wait_ends_a_call(how):
    """The wait ends although the signal ended no system call."""
    thread = LoopThread()

    async def work():
        asyncio.get_running_loop().call_later(0.1, interrupt_too_early)  # by then the main thread waits
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        getattr(thread, how)(work())
    thread.close()


def test_an_interrupt_just_before_the_wait_ends_the_wait_for_an_episode():
    """The same for a caller that iterates over episodes, of which none finishes."""
    finished = FinishedEpisodes(1, lambda item: item)
    timer = threading.Timer(0.1, interrupt_too_early)

    def wait():
        timer.start()  # here, so that the interrupt cannot come before pytest expects it
        next(finished)

    with pytest.raises(KeyboardInterrupt):
        wait()
    timer.join()


@pytest.mark.parametrize("how", ["call", "call_to_end"])
def test_a_timeout_of_the_coroutine_is_its_error(how):
    """It is not taken for the end of a wait."""
    thread = LoopThread()

    async def work():
        raise TimeoutError("too slow")

    with pytest.raises(TimeoutError, match="too slow"):
        getattr(thread, how)(work())
    thread.close()


def test_results_and_errors_of_a_call_to_its_end():
    """The call returns the result of the coroutine, or raises its error."""
    thread = LoopThread()

    async def add(one, other):
        await asyncio.sleep(0)
        return one + other

    assert 3 == thread.call_to_end(add(1, 2))
    with pytest.raises(TypeError):
        thread.call_to_end(add(1, None))
    thread.close()


STUCK = """
import asyncio, sys, threading
from turnwise.runtime.loop_thread import LoopThread
from turnwise.weights.finishing import CancellableWeights
from turnwise.weights.sleep import EngineMemory
from turnwise_testing import BigramEngine

class Stuck:
    def __iter__(self):
        print("reading", flush=True)
        threading.Event().wait()
        yield

engine, thread = BigramEngine(), LoopThread()
thread.call(engine.start())
CancellableWeights.cancel = lambda weights: print("cancelled", flush=True)
try:
    thread.call_to_end(EngineMemory(engine).update_weights(Stuck(), 1))
finally:
    print("raised", flush=True)
    thread.close()
"""


@pytest.mark.slow
def test_a_second_interrupt_ends_a_process_whose_weights_never_come():
    """The first one waits for the thread that reads the weights; after the second the process ends by itself."""
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True) as process:
        assert "reading\n" == process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert "cancelled\n" == process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert "raised\n" == process.stdout.readline()
        assert 0 != process.wait(WATCHDOG_S)
