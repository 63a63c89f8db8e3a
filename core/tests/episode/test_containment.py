"""Tasks of plugins cannot end an event loop, which would never run again."""

import asyncio

import pytest

from turnwise.episode.containment import ContainedTask, contain_exits


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
