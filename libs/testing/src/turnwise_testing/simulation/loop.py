"""
An event loop in virtual time that continues ready tasks in an order that a seed decides.

Each task is a lane: its steps keep their order, and so do plain callbacks among themselves. A random choice decides
which lane continues. asyncio continues tasks in the order in which they became ready, but sockets, timers and other
threads wake them in many orders.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from typing import Any

from turnwise_testing.simulation.scheduler import Scheduler, SimulatedThread, running


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address, so that sets of tasks have one order."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop without a selector: it waits in the scheduler for its timers and for calls from other threads."""

    # Attributes of asyncio's loop that typeshed leaves out.
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _stopping: bool
    _timer_cancelled_count: int
    _thread_id: int | None

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._waiting: SimulatedThread | None = None
        self._num_tasks = 0
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]  # without the type variables of typeshed

    def time(self) -> float:
        return self._scheduler.now

    def run_in_executor(  # type: ignore[override]  # without the type variables of typeshed
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a function in a new thread, or in the given executor."""
        if executor is not None:
            return super().run_in_executor(executor, func, *args)
        outcome = self.create_future()

        def job() -> None:
            try:
                settle = partial(outcome.set_result, func(*args))
            except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
                settle = partial(outcome.set_exception, error)
            if not self.is_closed():
                self.call_soon_threadsafe(lambda: None if outcome.done() else settle())

        self._scheduler.spawn(job, f"executor {getattr(func, '__name__', 'call')}")
        return outcome

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - as in asyncio
        """Do nothing: each call has a separate thread."""

    def call_soon_threadsafe(  # type: ignore[override]  # without the type variables of typeshed
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        if (found := running()) is not None and self._thread_id != found[1].ident:
            found[0].pass_turn(found[1])
        return handle

    def _write_to_self(self) -> None:
        if self._waiting is not None:
            self._scheduler.wake(self._waiting)

    def _process_events(self, event_list: object) -> None:
        """Do nothing: there are no files."""

    def _run_once(self) -> None:
        """Run one callback, or wait for one."""
        scheduler = self._scheduler
        scheduler.count_step()
        self._take_due()
        if not self._ready and not self._stopping:
            self._wait()
            self._take_due()
        if self._ready:
            handle = self._ready.popleft() if len(self._ready) == 1 else self._choose()
            if _lane_of(handle) and (delay := scheduler.draw_delay()):
                self.call_later(delay, self._ready.append, handle)
            elif not handle._cancelled:  # noqa: SLF001 - as in asyncio's own loop
                handle._run()  # noqa: SLF001
        if (found := running()) is not None:
            found[0].pass_turn(found[1])

    def _wait(self) -> None:
        found = running()
        if found is None:
            raise RuntimeError("a simulated event loop runs in simulated threads only")
        self._waiting = found[1]
        try:
            timeout = max(0.0, self._scheduled[0].when() - self.time()) if self._scheduled else None
            found[0].wait(found[1], timeout)
        finally:
            self._waiting = None

    def _take_due(self) -> None:
        while self._scheduled and (self._scheduled[0]._cancelled or self._scheduled[0].when() <= self.time()):  # noqa: SLF001
            handle = heapq.heappop(self._scheduled)
            handle._scheduled = False  # type: ignore[attr-defined]  # noqa: SLF001
            if handle._cancelled:  # noqa: SLF001
                self._timer_cancelled_count -= 1
            else:
                self._ready.append(handle)

    def _choose(self) -> asyncio.Handle:
        """Take the first callback of a random lane, or the first of all."""
        scheduler, ready = self._scheduler, self._ready
        if not scheduler.disturbance.reorder or scheduler.rng.random() >= scheduler.disturbance.reorder:
            return ready.popleft()
        lanes: dict[int, int] = {}
        for index, handle in enumerate(ready):
            lanes.setdefault(_lane_of(handle), index)
        # Sorted by the number of the task, because the order in which tasks became ready may depend on addresses.
        order = sorted(lanes)
        index = lanes[order[scheduler.choose(len(order))]]
        handle = ready[index]
        del ready[index]
        return handle

    def _make_task(
        self, _loop: asyncio.AbstractEventLoop, code: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        self._num_tasks += 1
        task = _Task(code, loop=self, **options)
        task.number = self._num_tasks
        return task


def _lane_of(handle: asyncio.Handle) -> int:
    """Return the number of the task that a callback continues; 0 for any other callback."""
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]  # noqa: SLF001
    return task.number if isinstance(task, _Task) else 0


class SimulatedLoopPolicy(asyncio.DefaultEventLoopPolicy):
    """Gives simulated threads a simulated loop, and other threads asyncio's own."""

    def new_event_loop(self) -> events.AbstractEventLoop:
        found = running()
        return super().new_event_loop() if found is None else SimulatedLoop(found[0])
