"""Work that outlives the cancellation of its caller, and weights whose reading can be cancelled."""

import asyncio
import threading
from contextvars import ContextVar

import pytest

from turnwise.errors import EngineError
from turnwise.weights.finishing import CancellableWeights, finish, finish_in_thread

WATCHDOG_S = 60


def test_cancelled_work_ends_before_its_caller():
    """However often the caller is cancelled, it leaves with the cancellation when the work is done, and not before."""
    log = []

    async def main():
        may_end = asyncio.Event()

        async def work():
            await may_end.wait()
            log.append("the work is done")
            return "its result"

        async def call():
            try:
                await finish(work(), on_cancel=lambda: log.append("told"), discard=log.append)
            finally:
                log.append("the caller leaves")

        async with asyncio.timeout(WATCHDOG_S), asyncio.TaskGroup() as group:
            task = group.create_task(call())
            for _ in range(2):
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.sleep(0)
            may_end.set()
        return task.cancelled()

    assert asyncio.run(main())
    assert ["told", "told", "the work is done", "its result", "the caller leaves"] == log


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_error_of_the_work_is_never_lost(cancelled):
    """It is raised, or is the cause of the cancellation."""

    async def work():
        await asyncio.sleep(0)
        raise ValueError("no room")

    async def main():
        async with asyncio.timeout(WATCHDOG_S):
            if cancelled:
                asyncio.current_task().cancel()
            await finish(work())

    with pytest.raises(asyncio.CancelledError if cancelled else ValueError) as caught:
        asyncio.run(main())
    assert "no room" == str(caught.value.__cause__ if cancelled else caught.value)


def test_the_end_of_the_loop_waits_for_a_thread():
    """The end of a loop cancels all its tasks; a function that changes an engine still ends first."""
    started, may_end, log = threading.Event(), threading.Event(), []

    def function():
        started.set()
        assert may_end.wait(WATCHDOG_S)
        log.append("the thread is done")

    async def call():
        try:
            await finish_in_thread(function)
        except asyncio.CancelledError:
            log.append("the call is cancelled")
            raise

    async def main():
        task = asyncio.ensure_future(call())
        while not started.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_later, 0.01, may_end.set)
        return task

    task = asyncio.run(main())

    assert task.cancelled()
    assert ["the thread is done", "the call is cancelled"] == log


def test_a_thread_has_the_context_of_its_caller_and_its_result_comes_back():
    """A function in a thread reads the context variables of its caller, and its results and errors come back."""
    variable = ContextVar("variable", default="unset")

    async def call():
        variable.set("of the caller")
        return await finish_in_thread(variable.get)

    def fail():
        raise EngineError("the disk is full")

    assert "of the caller" == asyncio.run(call())
    with pytest.raises(EngineError, match="the disk is full"):
        asyncio.run(finish_in_thread(fail))


def test_cancelled_weights_cannot_be_read_on():
    """They end with an error at the next weight, and otherwise look as they are."""

    class Source(list):
        specs = ("a spec",)

    weights = CancellableWeights(Source([("a", 1), ("b", 2)]))
    assert [("a", 1), ("b", 2)] == list(weights)
    assert (("a spec",), None) == (weights.specs, getattr(weights, "stored", None))
    reading = iter(weights)
    next(reading)
    weights.cancel()
    with pytest.raises(EngineError, match="the weight update was cancelled"):
        next(reading)
