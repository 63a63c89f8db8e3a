"""
Delays at the hand-overs between threads, tasks and processes: an engine must be right under every order of events.

A test on a quiet machine sees one order. Here each hand-over can take long, as on a busy machine, and everything else
continues meanwhile. Hand-overs of one thread keep their order.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from contextvars import Context
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple

from attrs import frozen

from turnwise_testing.probes.engine import Reference

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@frozen(kw_only=True)
class Delays:
    """
    Seconds that hand-overs take.

    Attributes:
        to_thread: from a call of a pool's thread to its start.
        from_thread: from a call of the event loop, by another thread, to its start.
        standstill: length of each stop of the engine's processes; stops repeat.
        switch: seconds after which Python may let another thread run; None leaves it alone.
        weights: before the first new weight, after it, and after the last.
    """

    to_thread: float = 0.0
    from_thread: float = 0.0
    standstill: float = 0.0
    switch: float | None = None
    weights: float = 0.0

    @contextmanager
    def applied(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Apply the delays to a `DelayedLoop`, this process and its children."""
        assert isinstance(loop, DelayedLoop)
        before, interval, ended = loop.delays, sys.getswitchinterval(), threading.Event()
        loop.delays = self
        sys.setswitchinterval(self.switch or interval)
        stopping = threading.Thread(target=_stand_still, args=(self.standstill, ended), daemon=True)
        if self.standstill:
            stopping.start()
        try:
            yield
        finally:
            ended.set()
            if self.standstill:
                stopping.join()
            sys.setswitchinterval(interval)
            loop.delays = before


NO_DELAYS: Final = Delays()
DELAYS: Final[Mapping[str, Delays]] = {
    "the loop hears threads late": Delays(from_thread=0.03, weights=0.005),
    "threads start late": Delays(to_thread=0.03, switch=1e-5, weights=0.02),
    "processes stand still": Delays(standstill=0.04, from_thread=0.002, to_thread=0.002),
}
"""Delays under which the checks of weights, versions and sleep must hold, by name."""


class DelayedLoop(asyncio.SelectorEventLoop):
    """
    An event loop whose hand-overs take time.

    Attributes:
        delays: of the running check.
    """

    delays: Delays = NO_DELAYS

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Schedule a call by another thread; the loop notices it late."""
        if not self.delays.from_thread:
            return super().call_soon_threadsafe(callback, *args, context=context)
        return super().call_soon_threadsafe(self._call_late, partial(callback, *args), context)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call a function in a thread of a pool, which starts late."""
        delay = self.delays.to_thread
        if not delay:
            return super().run_in_executor(executor, func, *args)

        def call() -> T:
            time.sleep(delay)
            return func(*args)

        return super().run_in_executor(executor, call)

    def _call_late(self, call: Callable[[], object], context: Context | None) -> None:
        self.call_later(self.delays.from_thread, call, context=context)


@frozen
class DelayedReference:
    """A reference whose weights come late: it waits before the first, after it, and after the last."""

    _reference: Reference
    _seconds: float

    def weights(self, *, variant: int) -> Iterable[tuple[str, Any]]:
        """Return the weights; iterating over them is slow."""
        return _Late(self._reference.weights(variant=variant), self._seconds)

    def scores(self, *args: Any, **options: Any) -> Any:
        """Return the scores of the reference."""
        return self._reference.scores(*args, **options)


@frozen(eq=False)
class _Late:
    weights: Iterable[tuple[str, Any]]
    seconds: float

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        time.sleep(self.seconds)
        for number, each in enumerate(self.weights):
            yield each
            if number == 0:
                time.sleep(self.seconds)
        time.sleep(self.seconds)


def _stand_still(seconds: float, ended: threading.Event) -> None:
    """Stop and continue the children of this process, as a busy system does."""
    import psutil  # engines with processes of their own need it too

    while not ended.wait(seconds):
        children = psutil.Process().children(recursive=True)
        for child in children:
            with suppress(psutil.Error):
                child.suspend()
        ended.wait(seconds)
        for child in children:
            with suppress(psutil.Error):
                child.resume()
