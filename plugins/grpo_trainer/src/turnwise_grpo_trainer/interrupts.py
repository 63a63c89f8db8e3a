"""Ctrl-C and SIGTERM, which is what a cluster sends before it takes a machine away."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts(interrupt: Callable[[], None]) -> Iterator[None]:
    """
    Call `interrupt` at the first signal; the second one does what it always does.

    Signals are heard in the main thread alone; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in _SIGNALS}

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    def handle(_signal: int, _frame: FrameType | None) -> None:
        restore()
        sys.stderr.write("\nturnwise: interrupted: writing a checkpoint; again to end without one\n")
        interrupt()

    for each in _SIGNALS:
        signal.signal(each, handle)
    try:
        yield
    finally:
        restore()
