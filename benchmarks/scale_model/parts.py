"""Parts of the scale model: processes that do one job at a time, coalesced messages, and engines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial

from attrs import Factory, define, field

from turnwise_routing_bench.event_queue import EventQueue
from turnwise_routing_bench.simulator import Replica, ReplicaModel, Running

Event = Callable[[], None]
Queue = EventQueue[Event]
Work = tuple[float, Event]
"""Seconds of CPU of a job, and the call at its end."""
Job = Callable[[], Work]
"""Called when the job starts, so that it can take all that has gathered until then."""


@define(eq=False)
class Cores:
    """Processor cores that processes share; jobs that find none wait in order."""

    free: float
    waiting: deque[Event] = field(factory=deque)

    def acquire(self, start: Event) -> None:
        if self.free >= 1:
            self.free -= 1
            start()
        else:
            self.waiting.append(start)

    def release(self) -> None:
        if self.waiting:
            self.waiting.popleft()()
        else:
            self.free += 1


@define(eq=False)
class Station:
    """
    A process with one event loop.

    Attributes:
        queue: of the simulation.
        cores: of its machine; None for a separate core.
        wake_s: seconds that a job takes longer if the process was idle before it.
        busy_s: seconds of all jobs that have ended.
        num_jobs: jobs that have ended.
        num_wakes: jobs that found the process idle.
    """

    queue: Queue
    cores: Cores | None = None
    wake_s: float = 0.0
    busy_s: float = 0.0
    num_jobs: int = 0
    num_wakes: int = 0
    _jobs: deque[Job] = field(factory=deque)
    _running: bool = False
    _woken: int = 0
    _started_at: float | None = None

    def add(self, job: Job, count: int = 1) -> None:
        """Do a job after all earlier ones; with a `count`, it represents so many jobs at different times."""
        self._jobs.append(job)
        if not self._running:
            self._running, self._woken = True, count
            self.num_wakes += count
            self._next()

    def add_work(self, cost_s: float, then: Event, count: int = 1) -> None:
        """Do a job whose cost is known; `count` as in `add`."""
        self.add(lambda: (cost_s, then), count)

    def busy_until(self, now: float) -> float:
        """Return the seconds of work so far, with the elapsed part of the current job."""
        return self.busy_s + (0.0 if self._started_at is None else now - self._started_at)

    def _next(self) -> None:
        if self.cores is None:
            self._start()
        else:
            self.cores.acquire(self._start)

    def _start(self) -> None:
        cost_s, then = self._jobs.popleft()()
        self._woken, cost_s = 0, cost_s + self._woken * self.wake_s
        self._started_at = self.queue.now
        self.queue.schedule(self.queue.now + cost_s, partial(self._end, cost_s, then))

    def _end(self, cost_s: float, then: Event) -> None:
        self.busy_s += cost_s
        self.num_jobs += 1
        self._started_at = None
        then()
        if self.cores is not None:
            self.cores.release()
        if self._jobs:
            self._next()
        else:
            self._running = False


def keep_busy(queue: Queue, cores: Cores, others: float) -> None:
    """Let programs outside the run take a number of cores, 3 ms at a time as a scheduler gives them out."""
    quantum_s, count = 0.003, math.ceil(others)
    pause_s = quantum_s * (count / others - 1)

    def take(station: Station) -> None:
        station.add_work(quantum_s, lambda: queue.schedule(queue.now + pause_s, partial(take, station)))

    for _ in range(count):
        take(Station(queue, cores))


def keep_pinging(driver: Station, num_actors: int, ping_s: float, call_s: float) -> None:
    """Let the driver call every actor each `ping_s` seconds, in up to fifty groups spread over that time."""
    queue, groups = driver.queue, min(50, num_actors)

    def ping() -> None:
        next_at = queue.now + ping_s / groups
        # A busy driver pings later, and never twice at once.
        driver.add_work(num_actors / groups * call_s, lambda: queue.schedule(max(next_at, queue.now), ping))

    ping()


@define(eq=False)
class Outbox:
    """
    Coalesced messages of a process to another one, as `turnwise.runtime.remote.coalescing.Coalescer` sends them.

    Attributes:
        station: of the sender.
        gap_s: shortest time between two messages.
        send: the job that sends everything that is ready.
    """

    station: Station
    gap_s: float
    send: Job
    _due: bool = False
    _sent_at: float = -1.0

    def schedule(self) -> None:
        """Send soon: something is ready."""
        if self._due:
            return
        self._due = True
        due_s = self._sent_at + self.gap_s
        if due_s <= self.station.queue.now:
            self.station.add(self._send)
        else:
            self.station.queue.schedule(due_s, partial(self.station.add, self._send))

    def flush(self) -> None:
        """Send as the next job."""
        self.station.add(self._send)

    def _send(self) -> Work:
        self._due = False
        self._sent_at = self.station.queue.now
        return self.send()


@define(eq=False)
class Engine:
    """
    The engine of a replica.

    Attributes:
        queue: of the simulation.
        model: seconds per token, whatever the load; or costs of a continuous-batching server.
        finish: called with each request that has ended.
        num_requests: requests here, running or queued.
        num_tokens: their context tokens.
        num_sent_tokens: context tokens of all requests so far.
        area: requests that run, integrated over time; 0 with a fixed speed, which has no limit.
    """

    queue: Queue
    model: ReplicaModel | float
    finish: Callable[[Running], None]
    num_requests: int = 0
    num_tokens: int = 0
    num_sent_tokens: int = 0
    area: float = 0.0
    replica: Replica = field(
        default=Factory(
            lambda self: Replica(self.model if isinstance(self.model, ReplicaModel) else ReplicaModel()), True
        )
    )
    _version: int = 0

    def admit(self, request: Running) -> None:
        """Run a request."""
        self.num_requests += 1
        self.num_tokens += request.context
        self.num_sent_tokens += request.context
        if isinstance(self.model, ReplicaModel):
            self.advance()
            self.replica.add(request)
            self._plan()
        else:
            at_s = self.queue.now + self.model * request.num_new_tokens
            self.queue.schedule(at_s, partial(self._end_fixed, self._version, request))

    def fail(self) -> None:
        """Lose all requests and the cache."""
        self.advance()
        self.replica.fail()
        self.num_requests = self.num_tokens = 0
        self._version += 1

    def advance(self) -> None:
        """Work until now."""
        self.area += (self.queue.now - self.replica.now) * len(self.replica.running)
        self.replica.advance(self.queue.now)

    def _plan(self) -> None:
        # The next end changes with every request, so only the latest plan counts.
        self._version += 1
        if self.replica.running:
            at_s = max(self.queue.now, self.replica.next_finish())
            self.queue.schedule(at_s, partial(self._end, self._version))

    def _end(self, version: int) -> None:
        if version == self._version:
            self.advance()
            ended = self.replica.finish()
            self._plan()
            self._report(ended)

    def _end_fixed(self, version: int, request: Running) -> None:
        if version == self._version:
            self._report(request)

    def _report(self, ended: Running) -> None:
        self.num_requests -= 1
        self.num_tokens -= ended.context
        self.finish(ended)
