"""Interrupts a thread that waits for a manager, as Ctrl-C does."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from attrs import frozen

from turnwise.runtime.loop_thread import LoopThread


@frozen(eq=False)
class _Interrupted:
    """A future that interrupts a thread when it waits too long for the result."""

    future: concurrent.futures.Future[Any]
    seconds: float

    def done(self) -> bool:
        return self.future.done()

    def result(self, _timeout: float | None = None) -> Any:
        # The interrupt comes after `seconds`, in whatever pieces the caller waits.
        concurrent.futures.wait([self.future], self.seconds)
        if not self.future.done():
            raise KeyboardInterrupt
        return self.future.result()

    def cancel(self) -> bool:
        return self.future.cancel()


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise `KeyboardInterrupt` whenever this thread waits longer for a manager's event loop."""
    submit, caller = LoopThread.submit, threading.current_thread()

    def submit_interrupted(self: LoopThread, coroutine: Coroutine[object, object, Any]) -> Any:
        future = submit(self, coroutine)
        return _Interrupted(future, seconds) if threading.current_thread() is caller else future

    with mock.patch.object(LoopThread, "submit", submit_interrupted):
        yield
