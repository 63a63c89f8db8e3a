"""The end of a program, and the signals that ask for it: Ctrl-C, a scheduler's SIGTERM, a closed terminal's SIGHUP."""

from __future__ import annotations

import os
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
    before = {each: signal.getsignal(each) for each in _signals()}

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    _set_handlers(handle)
    try:
        yield restore
    finally:
        restore()


def end_at_interrupts(code: Callable[[], int]) -> None:
    """
    End this process at each such signal from now on with an exit code: its command has ended, or cannot handle one.

    Python takes up to seconds to end. A signal in this time would replace the exit code, or print a traceback.
    """
    if threading.current_thread() is threading.main_thread():
        _set_handlers(lambda: os._exit(code()))


def _signals() -> list[signal.Signals]:
    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


def _set_handlers(handle: Callable[[], None]) -> None:
    def call(_signal: int, _frame: FrameType | None) -> None:
        # Ray's C++ code sees SIGTERM before Python does, and sets an alarm that aborts the process three seconds later.
        signal.alarm(0)
        handle()

    for each in _signals():
        signal.signal(each, call)


def raise_interrupt() -> None:
    """Raise `KeyboardInterrupt`, as Ctrl-C does."""
    raise KeyboardInterrupt
