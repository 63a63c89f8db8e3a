"""Waits for work to its end despite cancellations, so that the next call finds no engine in the middle of a change."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, TypeVar

from attrs import define, field

from turnwise.errors import EngineError
from turnwise.protocols.weights import Weight

T = TypeVar("T")


def _ignore(*_: object) -> None:
    """Do nothing."""


async def finish(
    work: Awaitable[T], *, on_cancel: Callable[[], object] = _ignore, discard: Callable[[T], object] = _ignore
) -> T:
    """
    Wait for work to its end, even if this task is cancelled meanwhile; then the cancellation is raised.

    Args:
        work: a coroutine, which becomes a new task, or a future.
        on_cancel: called at each cancellation, to let the work end soon.
        discard: called with a result that has no reader, because of a cancellation.
    """
    # Not a task group: it would cancel the work together with this task.
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as cancellation:
            cancelled = cancellation
            on_cancel()
    if cancelled is None:
        return future.result()
    # Retrieved in any case: asyncio logs exceptions that are never retrieved.
    error = None if future.cancelled() else future.exception()
    if error is None and not future.cancelled():
        discard(future.result())
    raise cancelled from error


async def finish_in_thread(function: Callable[[], T], *, discard: Callable[[T], object] = _ignore) -> T:
    """
    Call a function in a thread, as `asyncio.to_thread` does, but return only after the function has.

    A cancelled `asyncio.to_thread` leaves its thread running, which would change the engine during the next call.
    """
    called: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = contextvars.copy_context()

    def call() -> None:
        nonlocal function
        try:
            result = context.run(function)
        except BaseException as error:  # noqa: BLE001 - raised in the waiting task
            called.set_exception(error)
        else:
            del function  # it may hold staged weights, and the caller measures or needs their memory at once
            called.set_result(result)

    # No thread of a pool: the end of the process would wait for it, and the weights that it reads may never come.
    threading.Thread(target=call, name="turnwise-weights", daemon=True).start()
    # A future and no task: the end of a loop cancels all its tasks, and a thread cannot be cancelled.
    return await finish(asyncio.wrap_future(called), discard=discard)


@define(eq=False)
class CancellableWeights:
    """
    Weights whose reading fails once their update is cancelled. An engine that cannot read its weights changes nothing.

    All other attributes are the attributes of the weights.
    """

    _weights: Iterable[Weight]
    _cancelled: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[Weight]:
        for weight in self._weights:
            if self._cancelled:
                raise EngineError("the weight update was cancelled")
            yield weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def cancel(self) -> None:
        """Let the reader fail at the next weight."""
        self._cancelled = True
