"""
Replaces Python's locks, threads and clocks by simulated ones.

`install` must run before the modules under test are imported, because many keep a reference to `threading.Lock` or
`time.monotonic`. So a simulation runs in a separate process. Outside of simulated threads, Python's own ones work.
Conditions, events, semaphores, queues and futures of the standard library are built on these locks and need no patch.
"""

from __future__ import annotations

import _thread
import asyncio
import functools
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, SupportsIndex

from turnwise_testing.simulation.scheduler import Scheduler, SimulatedThread, running

_RealLock: Final = _thread.allocate_lock
_RealRLock: Final = _thread.RLock
_SIMULATED: Final = "_turnwise_simulated"
_INSTALLED: Final[list[bool]] = []


class SimulatedLock:
    """`threading.Lock`: blocks only simulated threads, and lets them take it in a random order."""

    def __init__(self) -> None:
        self._real = _RealLock()
        self._held = False
        self._waiting: list[SimulatedThread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        found = running()
        if found is None:
            return self._real.acquire(blocking, timeout)
        scheduler, thread = found
        scheduler.pass_turn(thread)
        if self._held and not blocking:
            return False
        if self._held and not self._wait(scheduler, thread, timeout):
            return False
        self._held = True
        return True

    __enter__ = acquire

    def release(self) -> None:
        found = running()
        if found is None:
            self._real.release()
            return
        if not self._held:
            raise RuntimeError("release unlocked lock")
        self._held = False
        scheduler, thread = found
        if self._waiting:
            scheduler.wake(self._waiting.pop(scheduler.choose(len(self._waiting))))
        scheduler.pass_turn(thread)

    def __exit__(self, *_error: object) -> None:
        self.release()

    def locked(self) -> bool:
        return self._held if running() else self._real.locked()

    def _at_fork_reinit(self) -> None:
        self._real = _RealLock()
        self._held = False

    def _wait(self, scheduler: Scheduler, thread: SimulatedThread, timeout: float) -> bool:
        """Wait until the lock is free; return False after the timeout."""
        end = scheduler.now + timeout
        while self._held:
            self._waiting.append(thread)
            try:
                woken = scheduler.wait(thread, None if timeout < 0 else end - scheduler.now)
            finally:
                if thread in self._waiting:
                    self._waiting.remove(thread)
            if not woken and self._held:
                return False
        return True


class SimulatedRLock:
    """`threading.RLock`, over a `SimulatedLock`."""

    def __init__(self) -> None:
        self._lock = SimulatedLock()
        self._real = _RealRLock()
        self._owner: SimulatedThread | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        found = running()
        if found is None:
            return self._real.acquire(blocking, timeout)
        if self._owner is found[1]:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = found[1], 1
        return True

    __enter__ = acquire

    def release(self) -> None:
        found = running()
        if found is None:
            self._real.release()
            return
        if self._owner is not found[1]:
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def __exit__(self, *_error: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self.__init__()  # type: ignore[misc]  # the child of a fork starts with a free lock

    # `threading.Condition` releases the lock and takes it again with these methods.

    def _release_save(self) -> Any:
        if running() is None:
            return self._real._release_save()  # type: ignore[attr-defined]  # noqa: SLF001
        state = (self._count, self._owner)
        self._count, self._owner = 0, None
        self._lock.release()
        return state

    def _acquire_restore(self, state: Any) -> None:
        if running() is None:
            self._real._acquire_restore(state)  # type: ignore[attr-defined]  # noqa: SLF001
            return
        self._lock.acquire()
        self._count, self._owner = state

    def _is_owned(self) -> bool:
        found = running()
        if found is None:
            return bool(self._real._is_owned())  # type: ignore[attr-defined]  # noqa: SLF001
        return self._owner is found[1]


class _ThreadEnd:
    """The end of a simulated thread, for `join` and `is_alive`."""

    def __init__(self) -> None:
        self.reached = False
        self.waiting: list[SimulatedThread] = []


def _patch_threads() -> None:
    real_start, real_join, real_is_alive = threading.Thread.start, threading.Thread.join, threading.Thread.is_alive

    def start(self: threading.Thread) -> None:
        found = running()
        if found is None:
            real_start(self)
            return
        scheduler, thread = found
        end = _ThreadEnd()
        setattr(self, _SIMULATED, end)
        self._started.set()  # type: ignore[attr-defined]
        scheduler.spawn(functools.partial(_run_as_thread, self, end, scheduler), self.name, self)
        scheduler.pass_turn(thread)

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        end, found = getattr(self, _SIMULATED, None), running()
        if end is None:
            real_join(self, timeout)
        elif found is not None and not end.reached:
            end.waiting.append(found[1])
            found[0].wait(found[1], timeout)

    def is_alive(self: threading.Thread) -> bool:
        end = getattr(self, _SIMULATED, None)
        return real_is_alive(self) if end is None else not end.reached

    threading.Thread.start, threading.Thread.join = start, join  # type: ignore[method-assign]
    threading.Thread.is_alive = is_alive  # type: ignore[method-assign]


def _run_as_thread(thread: threading.Thread, end: _ThreadEnd, scheduler: Scheduler) -> None:
    try:
        thread.run()
    finally:
        end.reached = True
        for each in end.waiting:
            scheduler.wake(each)


def _patch_clock() -> None:
    for name in ("monotonic", "perf_counter", "time"):
        setattr(time, name, _clock(getattr(time, name)))
    # Both have imported the function by name, for the time limits of semaphores, conditions and queues.
    threading._time = queue.time = time.monotonic  # type: ignore[attr-defined]  # noqa: SLF001
    real_sleep = time.sleep

    def sleep(seconds: SupportsIndex | float) -> None:
        found = running()
        if found is None:
            real_sleep(seconds)
        else:
            found[0].wait(found[1], float(seconds))

    time.sleep = sleep


def _clock(real: Callable[[], float]) -> Callable[[], float]:
    def read() -> float:
        found = running()
        return real() if found is None else found[0].now

    return read


def install() -> None:
    """Replace locks, threads, queues, clocks and event loops in this process; a second call does nothing."""
    from turnwise_testing.simulation.loop import SimulatedLoopPolicy

    if _INSTALLED:
        return
    _INSTALLED.append(True)
    _patch_threads()
    _patch_clock()
    threading.Lock = threading._allocate_lock = SimulatedLock  # type: ignore[attr-defined, assignment]  # noqa: SLF001
    threading.RLock = SimulatedRLock  # type: ignore[assignment]
    # `cached_property` of Python 3.11 computes a value under a lock.
    functools.RLock = SimulatedRLock  # type: ignore[attr-defined]
    queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[attr-defined, misc]  # noqa: SLF001
    asyncio.set_event_loop_policy(SimulatedLoopPolicy())


@contextmanager
def seeded_random(seed: int) -> Iterator[None]:
    """Seed the module `random` for a simulation, and with it the ids of `uuid`; restore both at the end."""
    state, urandom = random.getstate(), os.urandom
    random.seed(seed)
    os.urandom = random.randbytes
    try:
        yield
    finally:
        random.setstate(state)
        os.urandom = urandom
