"""The end of a program, and the signals that ask for it: Ctrl-C, a scheduler's SIGTERM, a closed terminal's SIGHUP."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

ENDS_WITHOUT_HANDLERS: Final = threading.Event()
"""Set when a library would keep this process from its end: the command line then ends it without exit handlers."""


@contextmanager
def handle_interrupts(handle: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """
    Call a function at each such signal until the block ends, or until the function that is entered is called.

    SIGHUP stays ignored where it is, as under `nohup`. Python delivers signals only to the main thread; in any other
    thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    before = {each: signal.getsignal(each) for each in signals}

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    def call(_signal: int, _frame: FrameType | None) -> None:
        handle()

    for each in signals:
        signal.signal(each, call)
    try:
        yield restore
    finally:
        restore()


def raise_interrupt() -> None:
    """Raise `KeyboardInterrupt`, as Ctrl-C does."""
    raise KeyboardInterrupt
