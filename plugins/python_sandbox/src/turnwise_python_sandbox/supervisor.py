"""
One thread that owns the fork servers: it starts them, hands them runs, reads what programs print, and answers.

Callers on any thread or event loop only put jobs into its queue; nothing else is shared, so nothing needs a lock but
that queue.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from attrs import define, field

from turnwise_python_sandbox.box import messages
from turnwise_python_sandbox.box.messages import Began, Ended, Launch, Ready, Signal
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.launching import Recipe, Spawned, spawn

_logger: Final = logging.getLogger(__name__)
_START_S: Final = 60.0
_GRACE_S: Final = 0.7
"""After a program's own limit; the supervisor then answers whether or not the server has."""
_BEGIN_S: Final = 10.0
"""Within which a server that has a launch must have begun it."""
_STUCK_S: Final = 10.0
"""Within which a server must have reaped a program whose time is over."""
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_MAX_FAILED_STARTS: Final = 3


@define(eq=False)
class _Server:
    spawned: Spawned
    started_at: float
    ready: Ready | None = None
    jobs: dict[int, Job] = field(factory=dict)

    def send(self, message: messages.Message, files: list[int] | None = None) -> None:
        socket.send_fds(self.spawned.control, [messages.encode(message)], files or [])


class Supervisor:
    """
    Runs jobs on fork servers.

    Args:
        recipe: how a server is started.
        num_servers: most servers; a further one starts when all others are busy.
        capacity: most programs at a time, over all servers.
        max_sessions: most sessions at a time, which do not count as programs.
    """

    def __init__(self, recipe: Recipe, num_servers: int, capacity: int, max_sessions: int) -> None:
        self._recipe = recipe
        self._num_servers = min(num_servers, capacity)
        self._per_server = -(-capacity // self._num_servers)
        self._capacity = capacity
        self._max_sessions = max_sessions
        self._queue: deque[Callable[[], None]] = deque()
        self._waiting: deque[Job] = deque()
        self._servers: list[_Server] = []
        self._failed_starts = 0
        self._start_after = 0.0
        self.last_ready: Ready | None = None
        """What the server that got ready last said of itself."""
        self._closing = False
        self._numbers = itertools.count(1)
        self.calls = ThreadPoolExecutor(capacity, thread_name_prefix="turnwise-session")
        """Where calls of sessions wait, no more of them at a time than programs may run."""
        self._selector = selectors.DefaultSelector()
        self._wake_ours, self._wake_theirs = socket.socketpair()
        for each in (self._wake_ours, self._wake_theirs):
            each.setblocking(False)
        self._selector.register(self._wake_ours, selectors.EVENT_READ, self._drain_wakes)
        self._thread = threading.Thread(target=self._run, name="turnwise-sandbox", daemon=True)
        self._thread.start()

    # For callers on any thread

    def number(self) -> int:
        """Return a new job's number."""
        return next(self._numbers)

    def submit(self, job: Job) -> None:
        """Queue a job; its `answer` will be set, whatever happens."""
        self._call(lambda: self._accept(job))

    def kill(self, job: Job, number: int = signal.SIGKILL) -> None:
        """Send a signal to a job's program; a job that waits is taken out of the queue."""
        self._call(lambda: self._kill(job, number))

    def close(self) -> None:
        """End every program and server; jobs that are left are answered with `infra_error`. Idempotent."""
        self._call(self._begin_closing)
        self._thread.join()
        self.calls.shutdown(wait=True)

    def forget(self) -> None:
        """In a forked child: let go of the parent's servers without touching them."""
        for server in self._servers:
            server.spawned.control.close()
            for job in server.jobs.values():
                job.close_pipes()
        self._wake_ours.close()
        self._wake_theirs.close()
        self._selector.close()

    @property
    def server_pids(self) -> tuple[int, ...]:
        """Process ids of the servers that run now, for tests and for people."""
        return tuple(server.spawned.process.pid for server in self._servers)

    def _call(self, action: Callable[[], None]) -> None:
        self._queue.append(action)
        with contextlib.suppress(OSError):  # full: the thread is about to wake anyway; closed: it has ended
            self._wake_theirs.send(b"x")

    # On the thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - every caller must be answered, whatever is wrong here
                self._end_all(f"the supervisor failed: {type(error).__name__}: {error}")
        self._end_all("the sandbox was closed")
        self._selector.close()
        self._wake_ours.close()
        self._wake_theirs.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._patience_s()):
            key.data()
        while self._queue:
            self._queue.popleft()()
        self._enforce(time.monotonic())
        self._dispatch()

    def _end_all(self, reason: str) -> None:
        for server in list(self._servers):
            self._end(server, reason, retry=False)
        self._fail_waiting(reason)

    def _begin_closing(self) -> None:
        self._closing = True

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_ours.recv(4096):
                pass

    def _patience_s(self) -> float | None:
        deadlines = [self._deadline(job) for server in self._servers for job in server.jobs.values()]
        deadlines += [server.started_at + _START_S for server in self._servers if server.ready is None]
        if self._waiting and not self._servers:
            deadlines.append(self._start_after)
        # A session that runs a call has no deadline here.
        soonest = min(deadlines, default=math.inf)
        return None if soonest == math.inf else max(0.0, soonest - time.monotonic())

    def _deadline(self, job: Job) -> float:
        if job.session is not None and job.began_at:
            return job.idle_since + job.limits.timeout_s + (_STUCK_S if job.killed else 0.0)
        if not job.began_at:
            return job.sent_at + _BEGIN_S
        return job.began_at + job.limits.timeout_s + (_STUCK_S if job.answer.done() else _GRACE_S)

    def _accept(self, job: Job) -> None:
        if self._closing:
            job.fail("the sandbox was closed")
        else:
            self._waiting.append(job)

    def _kill(self, job: Job, number: int) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            job.fail("the run was cancelled before it began")
        for server in self._servers:
            if job.number in server.jobs:
                self._send(server, Signal(job.number, number))

    def _enforce(self, now: float) -> None:
        for server in list(self._servers):
            if server.ready is None and now > server.started_at + _START_S:
                self._end(server, "the fork server did not get ready in time")
            for job in list(server.jobs.values()):
                if now >= self._deadline(job):
                    self._overdue(server, job)

    def _overdue(self, server: _Server, job: Job) -> None:
        if job.session is not None and job.began_at and not job.killed:
            job.killed = True
            self._send(server, Signal(job.number, signal.SIGKILL))
        elif job.began_at and not job.answer.done():
            self._unregister(job)
            job.time_out()
        else:
            self._end(server, "the fork server hangs")

    # Servers

    def _dispatch(self) -> None:
        while self._waiting and (server := self._free_server(self._waiting[0])):
            self._hand_over(self._waiting.popleft(), server)
        starting = any(server.ready is None for server in self._servers)
        if self._waiting and not starting and len(self._servers) < self._num_servers:
            self._start()

    def _free_server(self, job: Job) -> _Server | None:
        ready = [server for server in self._servers if server.ready]
        running = [each for server in ready for each in server.jobs.values()]
        sessions = sum(each.session is not None for each in running)
        if job.session is not None:
            free = ready if sessions < self._max_sessions else []
        else:
            free = ready if len(running) - sessions < self._capacity else []
        best = min(free, key=lambda server: len(server.jobs), default=None)
        may_grow = len(self._servers) < self._num_servers
        # A further server is worth its start only when every other one is at work.
        return None if best and best.jobs and may_grow else best

    def _start(self) -> None:
        if time.monotonic() < self._start_after:
            return
        try:
            spawned = spawn(self._recipe)
        except Exception as error:  # noqa: BLE001 - no processes, no memory, no bubblewrap: all are answers
            self._start_failed(str(error))
            return
        spawned.control.setblocking(False)
        server = _Server(spawned, time.monotonic())
        self._servers.append(server)
        self._selector.register(spawned.control, selectors.EVENT_READ, lambda: self._hear(server))

    def _start_failed(self, reason: str) -> None:
        self._failed_starts += 1
        pause_s = min(_FIRST_PAUSE_S * 2**self._failed_starts, _LONGEST_PAUSE_S)
        self._start_after = time.monotonic() + pause_s
        if self._failed_starts >= _MAX_FAILED_STARTS and not self._servers:
            self._fail_waiting(f"no fork server can be started: {reason}")

    def _fail_waiting(self, reason: str) -> None:
        while self._waiting:
            self._waiting.popleft().fail(reason)

    def _end(self, server: _Server, reason: str, *, retry: bool = True) -> None:
        """Put an end to a server; runs that never began are tried once more, elsewhere."""
        self._servers.remove(server)
        self._selector.unregister(server.spawned.control)
        said = server.spawned.error_text()
        server.spawned.end()
        for job in server.jobs.values():
            self._unregister(job)
            if retry and not job.began_at and not job.answer.done() and job.attempts < 2:
                job.close_pipes()
                self._waiting.appendleft(job)
            else:
                job.fail(f"{reason}: {said}" if said else reason)
        if not self._closing:
            self._start_failed(f"{reason}: {said}")

    def _hear(self, server: _Server) -> None:
        try:
            data = server.spawned.control.recv(messages.MAX_BYTES)
            if not data:
                self._end(server, "the fork server died")
                return
            self._handle(server, messages.decode(data))
        except BlockingIOError:
            return
        except (OSError, messages.GarbageError) as error:
            self._end(server, f"the fork server is broken: {error}")

    def _handle(self, server: _Server, message: messages.Message) -> None:
        job = server.jobs.get(getattr(message, "job", -1))
        if isinstance(message, Ready):
            server.ready = self.last_ready = message
            for each in message.missing:
                _logger.warning("the sandbox cannot preload %s", each)
        elif isinstance(message, Began) and job:
            job.began_at = job.idle_since = time.monotonic()
            self._failed_starts = 0
        elif isinstance(message, Ended) and job:
            del server.jobs[job.number]
            self._unregister(job)
            job.finish(message)

    def _send(self, server: _Server, message: messages.Message, files: list[int] | None = None) -> bool:
        try:
            server.send(message, files)
        except OSError as error:
            self._end(server, f"the fork server takes no message: {error}")
            return False
        return True

    # Runs

    def _hand_over(self, job: Job, server: _Server) -> None:
        if job.answer.cancelled():
            return
        job.attempts += 1
        job.sent_at = time.monotonic()
        job.began_at = 0.0
        try:
            files = job.open_files()
        except OSError as error:
            job.fail(f"no files for the run: {error}")
            return
        server.jobs[job.number] = job
        for fd in job.pipes:
            self._selector.register(fd, selectors.EVENT_READ, lambda fd=fd: self._read(server, job, fd))
        launch: Launch = job.limits.launch(job.number, session=job.session is not None)
        self._send(server, launch, files)
        for fd in files:
            os.close(fd)

    def _read(self, server: _Server, job: Job, fd: int) -> None:
        if fd not in job.pipes:
            return
        more = job.read(fd)
        if job.output.over:
            self._unregister(job)
            self._send(server, Signal(job.number, signal.SIGKILL))
        elif not more:
            self._selector.unregister(fd)
            os.close(fd)
            del job.pipes[fd]

    def _unregister(self, job: Job) -> None:
        for fd in job.pipes:
            with contextlib.suppress(KeyError):
                self._selector.unregister(fd)
