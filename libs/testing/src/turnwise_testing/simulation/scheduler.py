"""
Runs the threads of a simulation one at a time, in an order and on a clock that a seed decides.

Each simulated thread is a real thread that waits at its gate until the scheduler lets it run. It gives its turn away
only when it blocks or hands something to another thread: at locks, queues, futures, sleeps and event loops.
All of these rest on the locks and clocks of `turnwise_testing.simulation.patches`. The clock moves only when every
thread waits, so a simulated hour of waiting costs nothing, and the same seed gives the same run.
"""

from __future__ import annotations

import _thread
import random
import sys
import threading
import traceback
from collections.abc import Callable
from enum import Enum
from typing import Final
from zlib import crc32

from attrs import define, frozen

START_S: Final = 1_000_000.0
"""Reading of the virtual clock at the start; far from 0, which code might take for a missing value."""
_FOREVER: Final = float("inf")


class SimulationStuckError(AssertionError):
    """No thread can continue, or the run took more steps or more virtual time than it may."""


class SimulationEnded(BaseException):
    """Ends the threads that are left when a simulation has ended; code under test must not catch it."""


@frozen(kw_only=True)
class Disturbance:
    """
    The departure of a run from the polite order, in which threads and tasks continue as early as possible, in order.

    Attributes:
        switch: probability that a thread gives its turn away at a hand-over.
        reorder: probability that an event loop continues another ready task than the first one.
        late: probability that a thread or a task continues later than it could, by up to `late_s` seconds.
        late_s: longest delay in seconds of virtual time.
        step_s: seconds of virtual time that each step of a thread takes; 0 for an infinitely fast machine.
    """

    switch: float = 0.0
    reorder: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    step_s: float = 0.0

    @classmethod
    def draw(cls, rng: random.Random) -> Disturbance:
        """Return a random disturbance; some runs disturb one kind of order and not the others."""
        return cls(
            switch=rng.choice((0.0, 0.1, 0.5)),
            reorder=rng.choice((0.0, 0.0, 0.1, 0.5)),
            late=rng.choice((0.0, 0.02, 0.2)),
            late_s=rng.choice((0.001, 0.1, 3.0)),
            step_s=rng.choice((0.0, 0.0, 0.0001)),
        )


POLITE: Final = Disturbance()


class _State(Enum):
    READY = "ready"
    WAITING = "waiting"
    ENDED = "ended"


@define(eq=False)
class SimulatedThread:
    """A thread of a simulation, with its gate and the end of its wait."""

    name: str
    number: int
    gate: _thread.LockType
    public: threading.Thread
    state: _State = _State.READY
    ready_at: float = 0.0
    deadline: float = _FOREVER
    timed_out: bool = False
    killed: bool = False
    ident: int = 0


class Scheduler:
    """
    The threads, the clock and the random choices of one run.

    Attributes:
        rng: makes all choices of the run.
        now: the virtual time in seconds.
        disturbance: of the order.
        digest: of all choices; two runs with equal digests made the same ones.
    """

    def __init__(self, seed: int, disturbance: Disturbance = POLITE, *, max_steps: int = 200_000) -> None:
        self.rng = random.Random(seed)
        self.disturbance = disturbance
        self.now = START_S
        self.digest = 0
        self.num_steps = 0
        self.failure: BaseException | None = None
        self._max_steps = max_steps
        self._max_now = START_S + 50_000.0
        self._threads: list[SimulatedThread] = []
        self._num_threads = 0
        self._by_ident: dict[int, SimulatedThread] = {}
        self._ending = False
        self._finished = _thread.allocate_lock()

    def run(self, main: Callable[[], None]) -> None:
        """
        Run a function as the first thread, and end all threads with it.

        Raises:
            SimulationStuckError: the run did not end.
            BaseException: raised by the function.
        """
        self._finished.acquire()

        def first() -> None:
            try:
                main()
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                self.failure = self.failure or error
            finally:
                self._ending = True

        _ACTIVE.append(self)
        try:
            self._hand_over(self.spawn(first, "main"))
            self._finished.acquire()
        finally:
            _ACTIVE.remove(self)
        if self.failure is not None:
            raise self.failure

    def spawn(self, function: Callable[[], None], name: str, public: threading.Thread | None = None) -> SimulatedThread:
        """
        Add a thread that runs a function; it starts when the scheduler chooses it.

        Args:
            function: an exception fails the run.
            name: in the descriptions of a run that is stuck.
            public: the result of `threading.current_thread` there.
        """
        public = public or threading.Thread(name=name, daemon=True)
        thread = SimulatedThread(
            name, self._num_threads, _thread.allocate_lock(), public, ready_at=self.now + self.draw_delay()
        )
        self._num_threads += 1
        thread.gate.acquire()
        self._threads.append(thread)
        _thread.start_new_thread(self._run_thread, (thread, function))
        return thread

    def current(self) -> SimulatedThread | None:
        """Return the simulated thread that calls this; None in any other thread."""
        return self._by_ident.get(_thread.get_ident())

    def pass_turn(self, thread: SimulatedThread) -> None:
        """Let another thread run if the seed says so; called where the current thread hands something over."""
        if self._ending:
            self._end_thread(thread)
            return
        if self.disturbance.switch and len(self._threads) > 1 and self.rng.random() < self.disturbance.switch:
            self._switch_from(thread)

    def wait(self, thread: SimulatedThread, timeout: float | None = None) -> bool:
        """Wait until `wake`; return False if `timeout` seconds of virtual time passed before."""
        if self._ending:
            self._end_thread(thread)
            return False
        thread.state, thread.timed_out = _State.WAITING, False
        thread.deadline = _FOREVER if timeout is None else self.now + max(timeout, 0.0)
        self._switch_from(thread)
        return not thread.timed_out

    def wake(self, thread: SimulatedThread) -> None:
        """Let a waiting thread continue, at once or after a delay that the seed decides."""
        if thread.state is _State.WAITING:
            thread.state, thread.ready_at = _State.READY, self.now + self.draw_delay()

    def choose(self, number: int) -> int:
        """Return a random number below `number`, and note the choice."""
        chosen = int(self.rng.random() * number)
        self.note(chosen)
        return chosen

    def note(self, value: int) -> None:
        """Add a value to the digest of the run."""
        self.digest = crc32(value.to_bytes(4, "little"), self.digest)

    def count_step(self) -> None:
        """Count a step of the run; an endless one fails."""
        self.num_steps += 1
        self.now += self.disturbance.step_s
        if self.num_steps > self._max_steps or self.now > self._max_now:
            self._fail(
                f"the run had not ended after {self.num_steps} steps and {self.now - START_S:.0f} virtual seconds"
            )

    def draw_delay(self) -> float:
        """Return the random delay in seconds of a thread or a task that could continue; mostly 0."""
        disturbance = self.disturbance
        if disturbance.late and self.rng.random() < disturbance.late:
            return self.rng.random() * disturbance.late_s
        return 0.0

    def _run_thread(self, thread: SimulatedThread, function: Callable[[], None]) -> None:
        thread.ident = _thread.get_ident()
        self._by_ident[thread.ident] = thread
        # Without an entry, `current_thread` would make an object, and take locks in doing so.
        active: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]  # noqa: SLF001
        active[thread.ident] = thread.public
        thread.public._ident = thread.ident  # type: ignore[attr-defined]  # noqa: SLF001
        thread.gate.acquire()
        try:
            if not thread.killed:
                function()
        except SimulationEnded:
            pass
        except BaseException as error:  # noqa: BLE001 - the run fails with it
            if not thread.killed:
                self.failure = self.failure or error
        finally:
            thread.state = _State.ENDED
            active.pop(thread.ident, None)
            self._threads.remove(thread)
            del self._by_ident[thread.ident]
            self._hand_over(self._next())

    def _switch_from(self, thread: SimulatedThread) -> None:
        """Let the next thread run, and return when this one is next."""
        following = self._next()
        if following is not thread:
            self._hand_over(following)
            thread.gate.acquire()
        if thread.killed:
            raise SimulationEnded

    def _hand_over(self, thread: SimulatedThread | None) -> None:
        if thread is None:
            self._finished.release()
        else:
            thread.gate.release()

    def _next(self) -> SimulatedThread | None:
        """Choose the thread that runs next, and move the clock to it; None when all threads have ended."""
        if self._ending:
            return self._next_to_end()
        self.count_step()
        if self._ending:
            return self._next_to_end()
        ready = [each for each in self._threads if each.state is _State.READY and each.ready_at <= self.now]
        if not ready:
            ready = self._advance()
            if not ready:
                return self._next_to_end()
        chosen = ready[self.choose(len(ready))] if len(ready) > 1 else ready[0]
        self.note(chosen.number)
        return chosen

    def _advance(self) -> list[SimulatedThread]:
        """Move the clock to the next event; return the threads that continue then."""

        def due(thread: SimulatedThread) -> float:
            return thread.ready_at if thread.state is _State.READY else thread.deadline

        at = min(map(due, self._threads), default=_FOREVER)
        if at == _FOREVER:
            self._fail("every thread waits for another one")
            return []
        self.now = max(at, self.now)
        found = [each for each in self._threads if due(each) <= self.now]
        for thread in found:
            if thread.state is _State.WAITING:
                thread.state, thread.timed_out, thread.ready_at = _State.READY, True, self.now
        return found

    def _next_to_end(self) -> SimulatedThread | None:
        """Return a thread that is left, to end it; None if there is none."""
        if not self._threads:
            return None
        thread = self._threads[-1]
        thread.killed = True
        return thread

    def _end_thread(self, thread: SimulatedThread) -> None:
        """End a thread that waits or hands over after the end of the run; the main thread unwinds by itself."""
        thread.killed = True
        raise SimulationEnded

    def _fail(self, reason: str) -> None:
        if not self._ending:
            self.failure = self.failure or SimulationStuckError(f"{reason}\n{self._describe_threads()}")
            self._ending = True

    def _describe_threads(self) -> str:
        frames, lines = sys._current_frames(), []  # noqa: SLF001 - the only way to another thread's stack
        for thread in self._threads:
            frame = frames.get(thread.ident)
            stack = traceback.format_stack(frame)[-12:] if frame is not None else []
            lines.append(f"{thread.name} ({thread.state.value}):\n{''.join(stack)}")
        return "\n".join(lines)


_ACTIVE: Final[list[Scheduler]] = []
"""The scheduler of the running simulation; a process runs one at a time."""


def running() -> tuple[Scheduler, SimulatedThread] | None:
    """Return the scheduler and the thread of the caller; None outside of a simulation."""
    if _ACTIVE:
        scheduler = _ACTIVE[-1]
        thread = scheduler.current()
        if thread is not None:
            return scheduler, thread
    return None
