"""Keeps plugin code from holding an episode by swallowing its cancellation, and from ending an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Generic, TypeVar

import structlog
from attrs import define, field

from turnwise.errors import BoundaryError, Owner, boundary, describe

T = TypeVar("T")

_LEFT_BEHIND: Final[set[asyncio.Task[None]]] = set()
"""Tasks that ignored their cancellation; a loop refers to its tasks only weakly."""


@define(eq=False)
class ContainedTask(Generic[T]):
    """
    Plugin code in a separate task.

    A task that does not end within `grace_s` of its cancellation is left behind: it may run on, unobserved.

    Attributes:
        code: a coroutine.
        owner: of the code.
        name: of the code, for the log and the fault.
        grace_s: seconds to end after the cancellation.
        on_left: called when the task is left behind.
    """

    code: Coroutine[object, None, T]
    owner: Owner
    name: str
    grace_s: float
    on_left: Callable[[], None] = lambda: None
    cancelled: bool = field(default=False, init=False)
    _task: asyncio.Task[None] = field(init=False)
    _waiter: asyncio.Future[None] = field(init=False)
    _results: list[T] = field(factory=list, init=False)
    _error: BaseException | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        # In no task group: a group waits for its tasks, also for one that swallows its cancellation.
        self._task = loop.create_task(self._run())
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel the task; after the grace period `wait` returns whether the task has ended or not."""
        if not self.cancelled:
            self.cancelled = True
            self._task.cancel()
            asyncio.get_running_loop().call_later(self.grace_s, self._wake)

    async def wait(self, seconds: float | None = None) -> T:
        """
        Return the result of the code, which is cancelled after some seconds.

        Raises:
            TimeoutError: the code was cancelled.
            BoundaryError, EpisodeEnd: the code raised.
        """
        alarm = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.cancel)
        try:
            await self._waiter
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._results and task is not None:
                # The code has ended before the cancellation. Its result counts, and the next wait is cancelled.
                task.uncancel()
                task.cancel()
                return self._results[0]
            self._waiter = asyncio.get_running_loop().create_future()
            self.cancel()
            if not self._task.done():
                await self._waiter
            self._leave()
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
        if self._results:
            return self._results[0]
        self._leave()
        if self._error is None or (self.cancelled and isinstance(self._error, asyncio.CancelledError)):
            raise TimeoutError(self.name)
        if isinstance(self._error, asyncio.CancelledError):  # the code has cancelled its own task
            raise BoundaryError(self.owner, self.name, self._error)
        raise self._error

    async def _run(self) -> None:
        try:
            with boundary(self.owner, self.name):
                self._results.append(await self.code)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._error = error
        self._wake()

    def _end(self, _task: asyncio.Task[None]) -> None:
        # A task that is cancelled before its first step runs nothing: neither its code nor the end of `_run`.
        self.code.close()
        self._wake()

    def _wake(self) -> None:
        if not self._waiter.done():
            self._waiter.set_result(None)

    def _leave(self) -> None:
        if not self._task.done():
            _LEFT_BEHIND.add(self._task)
            self._task.add_done_callback(_LEFT_BEHIND.discard)
            self.on_left()
            structlog.get_logger().warning("left behind: the code ignored its cancellation", code=self.name)


def contain_exits() -> None:
    """
    Let no task of the running loop end the loop: its `KeyboardInterrupt` or `SystemExit` becomes a `RuntimeError`.

    asyncio lets these two out of the loop. Whoever runs the loop can run it again, but Ray does not.
    """

    def make_task(loop: asyncio.AbstractEventLoop, code: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(_WithoutExits(code), loop=loop, **options)

    asyncio.get_running_loop().set_task_factory(make_task)


@define(eq=False)
class _WithoutExits(Coroutine[Any, Any, Any]):
    """A coroutine whose exits are errors. No `async def`, which would not start code that is cancelled at once."""

    code: Coroutine[Any, Any, Any]

    def send(self, value: Any) -> Any:
        try:
            return self.code.send(value)
        except (KeyboardInterrupt, SystemExit) as error:
            raise _converted(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self.code.throw(*error)
        except (KeyboardInterrupt, SystemExit) as raised:
            raise _converted(raised) from raised

    def close(self) -> None:
        self.code.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.code.__await__()


def _converted(error: BaseException) -> RuntimeError:
    return RuntimeError(f"a task tried to end the process: {describe(error)}")
