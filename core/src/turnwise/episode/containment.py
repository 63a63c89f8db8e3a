"""Keeps plugin code from holding an episode by swallowing its cancellation, and from ending an event loop."""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from typing import Any, Final, Generic, TypeVar, cast

import structlog
from attrs import define, field

from turnwise.errors import BoundaryError, Owner, boundary, describe

T = TypeVar("T")

_LEFT_BEHIND: Final[set[asyncio.Task[None]]] = set()
"""Tasks that ignored their cancellation; a loop refers to its tasks only weakly."""


@define(eq=False)
class Waits:
    """
    The waits of an episode for plugin code, in the order of their start. Code that returns at once is not waited for.

    Attributes:
        since: name of the code, and the time of the loop at which the wait started.
        ended_at: time of the loop at which the last wait ended.
    """

    since: dict[ContainedTask[Any], tuple[str, float]] = field(factory=dict)
    ended_at: float = 0.0


@define(eq=False)
class ContainedTask(Generic[T]):
    """
    Plugin code in a separate task, which starts with `wait`.

    A task that does not end within `grace_s` of its cancellation is left behind: it may run on, unobserved.

    Attributes:
        code: a coroutine.
        owner: of the code.
        name: of the code, for the log and the fault.
        grace_s: seconds to end after the cancellation.
        on_left: called when the task is left behind.
        waits: has the task while it is waited for.
    """

    code: Coroutine[object, None, T]
    owner: Owner
    name: str
    grace_s: float
    on_left: Callable[[], None] = lambda: None
    waits: Waits = field(factory=Waits)
    cancelled: bool = field(default=False, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _waiter: asyncio.Future[None] | None = field(default=None, init=False)
    _results: list[T] = field(factory=list, init=False)
    _error: BaseException | None = field(default=None, init=False)

    def cancel(self) -> None:
        """Cancel the task; after the grace period `wait` returns whether the task has ended or not."""
        if not self.cancelled:
            self.cancelled = True
            if self._task is not None:
                self._task.cancel()
                asyncio.get_running_loop().call_later(self.grace_s, self._wake)

    async def wait(self, seconds: float | None = None) -> T:
        """
        Return the result of the code, which is cancelled after some seconds.

        Raises:
            TimeoutError: the code was cancelled.
            BoundaryError, EpisodeEnd: the code raised.
        """
        if self.cancelled:
            self.code.close()
            raise TimeoutError(self.name)
        task = self._start()
        if not self._results and self._error is None:  # most tools return before their first wait
            await self._wait_for(task, seconds)
        if self._results:
            return self._results[0]
        if self._error is None or (self.cancelled and isinstance(self._error, asyncio.CancelledError)):
            raise TimeoutError(self.name)
        if isinstance(self._error, asyncio.CancelledError):  # the code has cancelled its own task
            raise BoundaryError(self.owner, self.name, self._error)
        raise self._error

    async def wait_owning(self, seconds: float | None = None) -> T:
        """
        Return what `wait` does, but where the caller is cancelled, a failure of the infrastructure comes first.

        So code that needs a machine, and is cancelled before it has one, can say who is to blame.
        """
        try:
            return await self.wait(seconds)
        except asyncio.CancelledError:
            if isinstance(self._error, BoundaryError) and self._error.owner == "infra":
                raise self._error from None
            raise

    def _start(self) -> asyncio.Task[None]:
        """Start the task, and run the code up to its first wait now, as `eager_start` of Python 3.12 does."""
        loop, context, started = asyncio.get_running_loop(), copy_context(), _Wrapped(self._run())
        caller = cast("asyncio.Task[Any]", asyncio.current_task())
        # In no task group: a group waits for its tasks, also for one that swallows its cancellation.
        self._task = task = loop.create_task(started, context=context)
        # The code runs as its own task, which its timeouts and task groups cancel.
        _leave_task(loop, caller)
        _enter_task(loop, task)
        try:
            context.run(started.start)
        finally:
            _leave_task(loop, task)
            _enter_task(loop, caller)
        return task

    async def _wait_for(self, task: asyncio.Task[None], seconds: float | None) -> None:
        """Wait for the end of the task, or of its grace period after a cancellation."""
        loop, caller = asyncio.get_running_loop(), asyncio.current_task()
        alarm = None if seconds is None else loop.call_later(seconds, self.cancel)
        self._waiter = loop.create_future()
        self.waits.since[self] = (self.name, loop.time())
        try:
            await self._waiter
        except asyncio.CancelledError:
            if self._results and caller is not None:
                # The code has ended before the cancellation. Its result counts, and the next wait is cancelled.
                caller.uncancel()
                caller.cancel()
                return
            self._waiter = loop.create_future()
            self.cancel()
            if not task.done():
                await self._waiter
            self._leave(task)
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
            del self.waits.since[self]
            self.waits.ended_at = loop.time()
        self._leave(task)

    async def _run(self) -> None:
        try:
            with boundary(self.owner, self.name):
                self._results.append(await self.code)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _leave(self, task: asyncio.Task[None]) -> None:
        if not task.done():
            _LEFT_BEHIND.add(task)
            task.add_done_callback(_LEFT_BEHIND.discard)
            self.on_left()
            structlog.get_logger().warning("left behind: the code ignored its cancellation", code=self.name)


@define(eq=False)
class _Wrapped(Coroutine[Any, Any, Any]):
    """A coroutine whose exits are errors, and which may run up to its first wait before its task does."""

    # No `async def`, which would not start code that is cancelled at once.
    code: Coroutine[Any, Any, Any]
    _awaited: list[object] | None = field(factory=list)  # None when the code has ended before its task

    def start(self) -> None:
        try:
            self._awaited = [self.code.send(None)]
        except StopIteration:
            self._awaited = None

    def send(self, value: object) -> Any:
        return self._awaited.pop() if self._awaited else self._step(self.code.send, value)

    def throw(self, *error: object) -> Any:
        future = self._awaited.pop() if self._awaited else None
        # A task cancels the future it waits for, then throws. Here it does not know yet that it waits.
        return future if asyncio.isfuture(future) and future.cancel() else self._step(self.code.throw, *error)

    def close(self) -> None:
        self.code.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.code.__await__()

    def _step(self, step: Callable[..., Any], *values: object) -> Any:
        if self._awaited is None:
            raise StopIteration
        try:
            return step(*values)
        except (KeyboardInterrupt, SystemExit) as error:
            raise RuntimeError(f"a task tried to end the process: {describe(error)}") from error


def contain_exits() -> None:
    """
    Let no task of the running loop end the loop: its `KeyboardInterrupt` or `SystemExit` becomes a `RuntimeError`.

    asyncio lets these two out of the loop. Whoever runs the loop can run it again, but Ray does not.
    """

    def make_task(loop: asyncio.AbstractEventLoop, code: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_Wrapped(code), loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(make_task)
