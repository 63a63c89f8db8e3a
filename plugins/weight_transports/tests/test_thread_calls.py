"""A call in a thread ends after its function, also when it is cancelled."""

import asyncio
import gc
import threading

import pytest

from turnwise_testing.transport_checks import within
from turnwise_weight_transports.thread_calls import call_in_thread


def test_results_and_errors_are_passed_on():
    """Positional and keyword arguments are passed, and results and exceptions return."""

    async def scenario():
        assert await call_in_thread(divmod, 7, 2) == (3, 1)
        assert await call_in_thread(sorted, [1, 2], reverse=True) == [2, 1]
        with pytest.raises(ZeroDivisionError):
            await call_in_thread(divmod, 7, 0)

    within(scenario())


@pytest.mark.parametrize("num_cancellations", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_a_cancellation_waits_for_the_function(num_cancellations, fails):
    """A second cancellation changes nothing, and no exception of the function is logged as lost."""
    started, release, returned = threading.Event(), threading.Event(), threading.Event()

    def function():
        started.set()
        assert release.wait(30)
        returned.set()
        if fails:
            raise ValueError("too late for anyone to read")

    async def scenario():
        losses = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: losses.append(context))
        task = asyncio.ensure_future(call_in_thread(function))
        assert await asyncio.to_thread(started.wait, 30)
        for _ in range(num_cancellations):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not task.done()
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert returned.is_set()
        del task
        await asyncio.get_running_loop().shutdown_default_executor()  # its thread may still refer to the exception
        gc.collect()
        assert losses == []

    within(scenario())
