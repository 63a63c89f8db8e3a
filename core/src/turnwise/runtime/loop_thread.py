"""An event loop in its own thread, so that scripts, notebooks and trainers can drive a run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import structlog
from attrs import define, field

from turnwise.errors import InfrastructureError, describe

T = TypeVar("T")

CHECK_S: Final = 1.0
"""Seconds between two checks: that the loop still runs, and for signals."""
_CANCEL_S: Final = 10.0
"""Longest wait in seconds for cancelled tasks at the end."""


@define(eq=False)
class _CancellableCall(Generic[T]):
    """A coroutine that can be cancelled at any time, also before its first step, and tells when it has ended."""

    coroutine: Coroutine[object, object, T]
    ended: threading.Event = field(factory=threading.Event, init=False)
    _task: asyncio.Task[object] | None = field(default=None, init=False)

    async def run(self) -> T:
        if self.ended.is_set():
            raise asyncio.CancelledError
        self._task = asyncio.current_task()
        try:
            return await self.coroutine
        finally:
            self.ended.set()

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self.coroutine.close()
            self.ended.set()


def _wait(future: concurrent.futures.Future[T]) -> T:
    """
    Return the result of a future; let an interrupt through within `CHECK_S`.

    An interrupt that comes between Python's last check for signals and the wait for the lock ends no wait without a
    limit: nothing would show it until the future is done.
    """
    while not future.done():
        with suppress(TimeoutError):  # also if the coroutine raised it: then the future is done
            return future.result(CHECK_S)
    return future.result()


class LoopThread:
    """
    A running event loop in a daemon thread. `close` cancels the tasks that are left.

    If the loop breaks, every waiter gets an `InfrastructureError`.
    """

    def __init__(self, name: str = "turnwise") -> None:
        self.loop = asyncio.new_event_loop()
        self._futures: set[concurrent.futures.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine in the loop, from any other thread."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call a function in the loop soon, from any thread; do nothing after the end of the loop."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function)

    def call(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine in the loop and wait for its result; an interrupt cancels it."""
        future = self.submit(coroutine)
        try:
            return _wait(future)
        except BaseException:
            # After Ctrl-C in this thread the coroutine would continue without a reader.
            future.cancel()
            raise

    def call_to_end(self, coroutine: Coroutine[object, object, T]) -> T:
        """
        Run a coroutine as `call` does, but raise an interrupt only when the coroutine has ended.

        So the coroutine leaves no work behind, such as a thread that still reads the caller's weights. A second
        interrupt is raised at once.
        """
        call = _CancellableCall(coroutine)
        try:
            return _wait(self.submit(call.run()))
        except BaseException:
            self.call_soon(call.cancel)
            while not call.ended.wait(CHECK_S) and self._thread.is_alive():
                pass
            raise

    def close(self) -> None:
        """Cancel the remaining tasks and end the thread; a second call does nothing."""
        if not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self._run_until_stopped()
            self._cancel_all()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        except BaseException as error:  # noqa: BLE001 - the thread ends, and its waiters raise the error
            structlog.get_logger().exception("the event loop broke")
            for future in tuple(self._futures):
                with suppress(concurrent.futures.InvalidStateError):  # it has ended in the meantime
                    future.set_exception(InfrastructureError(f"the event loop broke: {describe(error)}"))
        finally:
            self.loop.close()

    def _run_until_stopped(self) -> None:
        while True:
            try:
                return self.loop.run_forever()
            except (KeyboardInterrupt, SystemExit) as error:
                # A task of a plugin raised it. It fails this task alone, but asyncio lets it out of the loop as well.
                structlog.get_logger().error("a task tried to end the process", error=repr(error))

    def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            # Bounded: a plugin that swallows the cancellation must not hang the process at its end.
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_S))
