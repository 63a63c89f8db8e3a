"""
Threads for functions that may block: as many as there are calls at once.

A bounded pool would be filled by calls that hang, and the event loop's own pool is waited for in the end.
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
from typing import Any, Final


class _Threads:
    """Daemon threads, as many as there are jobs at once; those that are idle are used again."""

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[Callable[[], None]]] = deque()
        if hasattr(os, "register_at_fork"):  # where there are forks, a child has none of the threads
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


async def in_thread(func: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    """Wait for a call in a thread that has this task's context variables."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(settle_outcome: Callable[[], None]) -> None:
        if not outcome.done():  # a call that was cancelled has nobody who waits
            settle_outcome()

    def job() -> None:
        try:
            settled = functools.partial(outcome.set_result, context.run(func, **keywords))
        except (StopIteration, GeneratorExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            # What a future cannot hold, or what would end the coroutine, the loop or the task that waits for it.
            failure = RuntimeError(f"{type(error).__name__}: {error}")
            settled = functools.partial(outcome.set_exception, failure)
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            settled = functools.partial(outcome.set_exception, error)
        with suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(settle, settled)

    _THREADS.start(job)
    return await outcome
