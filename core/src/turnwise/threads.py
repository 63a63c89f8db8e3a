"""
Threads for functions that may block: one for each concurrent call.

Hanging calls would fill a bounded pool, and the event loop waits for its own pool when it closes.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Final, TypeVar

T = TypeVar("T")


class _Threads:
    """Daemon threads, one for each concurrent job; idle ones are reused."""

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[Callable[[], None]]] = deque()
        if hasattr(os, "register_at_fork"):  # a forked child has none of the threads
            os.register_at_fork(after_in_child=self._idle.clear)

    def start(self, job: Callable[[], None]) -> None:
        """Run a job, which must not raise, in a thread."""
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            threading.Thread(target=self._work, args=(jobs,), name="turnwise tool", daemon=True).start()
        jobs.put(job)

    def _work(self, jobs: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            jobs.get()()
            self._idle.append(jobs)


_THREADS: Final = _Threads()


async def in_thread(func: Callable[..., T], keywords: Mapping[str, object]) -> T:
    """Wait for a call in a thread that has this task's context variables."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(settle_outcome: Callable[[], None]) -> None:
        if not outcome.done():  # a cancelled call has no reader
            settle_outcome()

    def job() -> None:
        try:
            settled = functools.partial(outcome.set_result, context.run(func, **keywords))
        except (StopIteration, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            # A future cannot hold these, or they would end the waiting coroutine, its task or the loop.
            failure = RuntimeError(f"{type(error).__name__}: {error}")
            settled = functools.partial(outcome.set_exception, failure)
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            settled = functools.partial(outcome.set_exception, error)
        with suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(settle, settled)

    _THREADS.start(job)
    return await outcome
