"""A thread for the calls of one environment."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any


class CallThread:
    """
    Runs the sync calls of one environment, one after the other, in one thread: some libraries bind objects to theirs.

    The thread starts with the first call and ends with `end`. It is a daemon, because nothing can stop a call that
    hangs, and it must not hold the end of the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Return the result of a call; its exception, an exit included, is the cause of a `CallFailed`."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def settle(value: tuple[object, BaseException | None]) -> None:
            if not outcome.done():  # a cancelled call has no reader
                outcome.set_result(value)

        def job() -> None:
            value: tuple[object, BaseException | None]
            try:
                value = (context.run(function, *arguments), None)
            except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
                value = (None, error)
            with suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(settle, value)

        self.submit(job)
        value, error = await outcome
        if error is not None:
            raise CallFailed from error
        return value

    def submit(self, job: Callable[[], None]) -> None:
        """Run a function that raises nothing, after all calls before it."""
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"environment {self._name}", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """End the thread after all calls before."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class CallFailed(Exception):  # noqa: N818 - only carries the exception, its cause, out of the thread
    """A call raised its cause."""
