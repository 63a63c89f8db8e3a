"""Counts the requests that are being answered, so that work nobody waits for gives way to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class RunningRequests:
    """
    The requests that are being answered now. `with requests:` counts one.

    Background threads call `give_way` between two short pieces of work. A thread of low priority is no substitute: it
    would hold Python's lock while it waits for a processor.
    """

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def give_way(self, is_urgent: Callable[[], bool]) -> None:
        """Wait until no request runs, or until `is_urgent` holds; call `wake` when that may have changed."""
        with self._changed:
            self._changed.wait_for(lambda: self._count == 0 or is_urgent())

    def wake(self) -> None:
        """Let the threads in `give_way` look again."""
        with self._changed:
            self._changed.notify_all()
