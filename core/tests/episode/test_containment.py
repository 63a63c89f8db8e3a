"""Tasks of plugins cannot end an event loop, which would never run again."""

import asyncio
from contextvars import ContextVar

import pytest

from turnwise.episode.containment import ContainedTask, contain_exits
from turnwise.errors import BoundaryError


async def returns():
    """Return after a wait."""
    await asyncio.sleep(0)
    return 3


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_the_exit_of_a_task_is_an_error_of_the_task(kind):
    """The loop runs on, and whoever awaits the task learns of the exit. The same at a cancellation."""

    async def at_once():
        raise kind("sabotage")

    async def when_cancelled():
        try:
            await asyncio.Event().wait()
        finally:
            raise kind("sabotage")

    async def main():
        contain_exits()
        cancelled = asyncio.ensure_future(when_cancelled())
        await asyncio.sleep(0)
        cancelled.cancel()
        for task in (asyncio.ensure_future(at_once()), cancelled):
            with pytest.raises(RuntimeError, match=f"a task tried to end the process: {kind.__name__}: sabotage"):
                await task
        return await asyncio.ensure_future(returns())

    assert asyncio.run(main()) == 3


def test_other_outcomes_of_tasks_are_unchanged():
    """Results, errors and cancellations, also of code that has not started, and the name of a task."""

    async def fails():
        raise ValueError("as asked")

    async def main():
        contain_exits()
        make_task = asyncio.get_running_loop().create_task
        tasks = [make_task(returns()), make_task(fails()), make_task(returns(), name="unstarted")]
        tasks[-1].cancel()
        await asyncio.wait(tasks)
        return tasks

    finished, failed, cancelled = asyncio.run(main())
    assert finished.result() == 3
    assert isinstance(failed.exception(), ValueError)
    assert (cancelled.cancelled(), cancelled.get_name()) == (True, "unstarted")


def test_code_that_never_starts_is_not_left_behind():
    """A wait that is cancelled before the first step of the code ends at once, not after the grace period."""
    left = []

    async def main():
        contained = ContainedTask(returns(), "tool", "a tool", 600.0, lambda: left.append(1))
        waiting = asyncio.ensure_future(contained.wait())
        contained.cancel()
        with pytest.raises(TimeoutError, match="a tool"):
            await waiting

    asyncio.run(asyncio.wait_for(main(), 60))
    assert left == []


def test_code_that_never_waits_ends_within_the_wait_for_it():
    """No pass of the loop comes between, and an error comes at once as well."""

    async def fails():
        raise ValueError("as asked")

    async def main():
        passes = []
        asyncio.get_running_loop().call_soon(passes.append, 1)
        result = await ContainedTask(at_once(), "tool", "a tool", 600.0).wait()
        with pytest.raises(BoundaryError, match="as asked"):
            await ContainedTask(fails(), "tool", "a tool", 600.0).wait()
        return result, tuple(passes)

    async def at_once():
        return 3

    assert asyncio.run(main()) == (3, ())


def test_code_runs_as_its_own_task_from_its_first_step():
    """A timeout or a task group that starts there cancels the code, and not the task that waits for it."""
    inside = ContextVar("inside", default="caller")

    async def code():
        inside.set("code")
        first = asyncio.current_task()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        return first is asyncio.current_task(), first, inside.get()

    async def main():
        same, task, variable = await ContainedTask(code(), "tool", "a tool", 600.0).wait()
        caller = asyncio.current_task()
        return same, task is caller, caller.cancelling(), variable, inside.get()

    assert asyncio.run(main()) == (True, False, 0, "code", "caller")


def test_a_cancellation_before_the_second_step_reaches_the_code():
    """The code has run to its first wait, so it sees the cancellation there and may clean up."""
    seen = []

    async def code():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    async def main():
        contained = ContainedTask(code(), "tool", "a tool", 600.0)
        waiting = asyncio.ensure_future(contained.wait())
        asyncio.get_running_loop().call_soon(contained.cancel)
        with pytest.raises(TimeoutError, match="a tool"):
            await waiting

    asyncio.run(main())
    assert seen == ["cleaned up"]


def test_a_cancellation_before_the_second_step_reaches_the_awaited_task():
    """As in every other step, the task for which the code waits is cancelled, and not left to run."""
    order = []

    async def inner():
        try:
            await asyncio.Event().wait()
        finally:
            order.append("inner")

    async def code(task):
        try:
            await task
        finally:
            order.append("code")

    async def main():
        task = asyncio.ensure_future(inner())
        await asyncio.sleep(0)
        contained = ContainedTask(code(task), "tool", "tool", 1.0)
        asyncio.get_running_loop().call_soon(contained.cancel)
        with pytest.raises(TimeoutError):
            await contained.wait()
        return task.cancelled()

    assert asyncio.run(main())
    assert order == ["inner", "code"]
