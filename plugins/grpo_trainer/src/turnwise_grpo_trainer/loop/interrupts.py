"""Stops a training on Ctrl-C, and on SIGTERM, which a cluster sends before it takes a machine away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from attrs import define

from turnwise import handle_interrupts
from turnwise.errors import TurnwiseError
from turnwise.terminal import write_error


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
    """Call `interrupt` on the first Ctrl-C, SIGTERM or SIGHUP; a second one has its usual effect."""

    def handle() -> None:
        restore()
        with suppress(OSError, RuntimeError):  # Ctrl-C ends the reader of a pipe too, or interrupts another write
            write_error("\nturnwise: interrupted: writing a checkpoint; interrupt again to exit without one\n")
        interrupt()

    with handle_interrupts(handle) as restore:
        yield
