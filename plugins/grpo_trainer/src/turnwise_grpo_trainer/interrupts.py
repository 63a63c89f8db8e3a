"""Stops a training on Ctrl-C, and on SIGTERM, which a cluster sends before it takes a machine away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

from attrs import define

from turnwise.errors import TurnwiseError
from turnwise.terminal import write_error

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class TrainingInterruptedError(TurnwiseError):
    """The training was interrupted; a checkpoint holds its state."""


@define(eq=False)
class Interrupt:
    """
    A request to stop the training.

    Attributes:
        requested: whether to stop. A signal handler sets it, so there is no lock: a handler must not wait for one.
    """

    requested: bool = False

    def check(self) -> None:
        """Raise `TrainingInterruptedError` if a stop was requested."""
        if self.requested:
            raise TrainingInterruptedError("interrupted")


@contextmanager
def handle_signals(interrupt: Callable[[], None]) -> Iterator[None]:
    """
    Call `interrupt` on the first SIGINT or SIGTERM; a second one has its usual effect.

    Python delivers signals only to the main thread; in any other thread this does nothing.
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
        with suppress(OSError, RuntimeError):  # Ctrl-C ends the reader of a pipe too, or interrupts another write
            write_error("\nturnwise: interrupted: writing a checkpoint; interrupt again to exit without one\n")
        interrupt()

    for each in _SIGNALS:
        signal.signal(each, handle)
    try:
        yield
    finally:
        restore()
