"""
The thread that owns the fork servers: it starts them, assigns jobs, reads the programs' output and resolves the jobs.

Callers on other threads only post actions to the thread's loop, so that the supervisor's state needs no lock.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import socket
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from attrs import define, field

from turnwise_python_sandbox.box import messages
from turnwise_python_sandbox.box.messages import Exited, Ready, Signal, Started
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.result import Tier
from turnwise_python_sandbox.selector_loop import SelectorLoop
from turnwise_python_sandbox.server_command import ServerSpec
from turnwise_python_sandbox.server_process import ServerProcess, start_server

_logger: Final = logging.getLogger(__name__)
_READY_TIMEOUT_S: Final = 60.0
_LAUNCH_TIMEOUT_S: Final = 10.0
"""Between a launch and the server's `Started`."""
_GRACE_S: Final = 0.7
"""After a program's own limit; then the supervisor resolves the job, whether or not the server has replied."""
_REAP_TIMEOUT_S: Final = 10.0
"""Between a program's end, as the supervisor decided it, and the server's `Exited`."""
_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 5.0
_MAX_FAILED_STARTS: Final = 3
_MAX_ATTEMPTS: Final = 2
_CLOSED: Final = "the sandbox was closed"


@define(eq=False)
class _Server:
    process: ServerProcess
    start_deadline: float
    ready: Ready | None = None
    jobs: dict[int, Job] = field(factory=dict)

    def send(self, message: messages.Message, files: list[int] | None = None) -> None:
        socket.send_fds(self.process.control, [messages.encode(message)], files or [])


class Supervisor:
    """
    Runs jobs on fork servers.

    Args:
        spec: how to start a server.
        num_servers: most servers; a further one is started only while all others are busy.
        capacity: most programs at a time, over all servers.
        max_sessions: most sessions at a time, which do not count as programs.
    """

    def __init__(self, spec: ServerSpec, num_servers: int, capacity: int, max_sessions: int) -> None:
        self._spec = spec
        self._num_servers = min(num_servers, capacity)
        self._capacity = capacity
        self._max_sessions = max_sessions
        self._waiting: deque[Job] = deque()
        self._servers: list[_Server] = []
        self._failed_starts = 0
        self._next_start_at = 0.0
        self._closing = False
        self.last_ready: Ready | None = None
        """From the server that became ready last."""
        self.session_threads = ThreadPoolExecutor(capacity, thread_name_prefix="turnwise-session")
        """Threads on which calls of sessions wait; as many as programs may run at a time."""
        self._loop = SelectorLoop()
        self._thread = threading.Thread(target=self._run, name="turnwise-sandbox", daemon=True)
        self._thread.start()

    # For callers on any thread

    @property
    def tier(self) -> Tier:
        return self._spec.tier

    def submit(self, job: Job) -> None:
        if not self._loop.post(lambda: self._accept(job)):
            job.fail(_CLOSED)

    def kill(self, job: Job, number: int = signal.SIGKILL) -> None:
        """Send a signal to a job's program; remove a job that still waits from the queue."""
        self._loop.post(lambda: self._kill(job, number))

    def close(self) -> None:
        self._loop.post(self._set_closing)
        self._thread.join()
        self.session_threads.shutdown(wait=True)

    def detach_after_fork(self) -> None:
        # Only this process's copies of the descriptors: a message or a signal would reach the parent's servers.
        for server in self._servers:
            server.process.control.close()
            for job in server.jobs.values():
                job.pipes.close()
        self._loop.close()

    @property
    def server_pids(self) -> tuple[int, ...]:
        """Process ids of the running servers."""
        return tuple(server.process.process.pid for server in self._servers)

    # On the supervisor's thread

    def _run(self) -> None:
        while not self._closing:
            try:
                self._loop.run_once(self._select_timeout_s())
                self._enforce_deadlines(time.monotonic())
                self._dispatch()
            except Exception as error:  # noqa: BLE001 - every job must be resolved, whatever fails here
                self._end_all(f"the supervisor failed: {type(error).__name__}: {error}")
        self._end_all(_CLOSED)
        # Jobs that other threads have submitted until now fail here, and later ones in `submit`.
        self._loop.finish()
        self._loop.close()

    def _end_all(self, reason: str) -> None:
        for server in list(self._servers):
            self._end_server(server, reason, retry=False)
        self._fail_waiting(reason)

    def _set_closing(self) -> None:
        self._closing = True

    # Deadlines

    def _select_timeout_s(self) -> float | None:
        deadlines = [self._get_deadline(job) for server in self._servers for job in server.jobs.values()]
        deadlines += [server.start_deadline for server in self._servers if server.ready is None]
        if self._waiting and not self._servers:
            deadlines.append(self._next_start_at)
        # A session has no deadline during a call, because its owner keeps the time.
        soonest = min(deadlines, default=math.inf)
        return None if soonest == math.inf else max(0.0, soonest - time.monotonic())

    def _get_deadline(self, job: Job) -> float:
        if not job.started_at:
            return job.sent_at + _LAUNCH_TIMEOUT_S
        if job.session_fds is not None:
            return job.idle_since + job.limits.timeout_s + (_REAP_TIMEOUT_S if job.killed else 0.0)
        return job.started_at + job.limits.timeout_s + (_REAP_TIMEOUT_S if job.future.done() else _GRACE_S)

    def _enforce_deadlines(self, now: float) -> None:
        for server in list(self._servers):
            if server.ready is None and now > server.start_deadline:
                self._end_server(server, "the fork server was not ready in time")
            for job in list(server.jobs.values()):
                if now >= self._get_deadline(job):
                    self._handle_overdue(server, job)

    def _handle_overdue(self, server: _Server, job: Job) -> None:
        if job.session_fds is not None and job.started_at and not job.killed:
            job.killed = True
            self._send(server, Signal(job.id, signal.SIGKILL))
        elif job.started_at and not job.future.done():
            self._unregister_pipes(job)
            job.time_out()
        else:
            self._end_server(server, "the fork server does not respond")

    # Servers

    def _dispatch(self) -> None:
        while self._waiting and (server := self._find_free_server(self._waiting[0])):
            self._assign(self._waiting.popleft(), server)
        starting = any(server.ready is None for server in self._servers)
        if self._waiting and not starting and len(self._servers) < self._num_servers:
            self._start_server()

    def _find_free_server(self, job: Job) -> _Server | None:
        ready = [server for server in self._servers if server.ready]
        running = [each for server in ready for each in server.jobs.values()]
        num_sessions = sum(each.session_fds is not None for each in running)
        if job.session_fds is not None:
            free = ready if num_sessions < self._max_sessions else []
        else:
            free = ready if len(running) - num_sessions < self._capacity else []
        best = min(free, key=lambda server: len(server.jobs), default=None)
        may_grow = len(self._servers) < self._num_servers
        # While every server is busy, the job waits for a new one if there may be one more.
        return None if best and best.jobs and may_grow else best

    def _start_server(self) -> None:
        now = time.monotonic()
        if now < self._next_start_at:
            return
        try:
            process = start_server(self._spec)
        except Exception as error:  # noqa: BLE001 - no processes, no memory, no bubblewrap: reported to the callers
            self._record_failed_start(str(error))
            return
        process.control.setblocking(False)
        server = _Server(process, time.monotonic() + _READY_TIMEOUT_S)
        self._servers.append(server)
        self._loop.register(process.control, lambda: self._receive(server))

    def _record_failed_start(self, reason: str) -> None:
        self._failed_starts += 1
        pause_s = min(_FIRST_RETRY_S * 2**self._failed_starts, _LONGEST_RETRY_S)
        self._next_start_at = time.monotonic() + pause_s
        if self._failed_starts >= _MAX_FAILED_STARTS and not self._servers:
            self._fail_waiting(f"no fork server can be started: {reason}")

    def _fail_waiting(self, reason: str) -> None:
        while self._waiting:
            self._waiting.popleft().fail(reason)

    def _end_server(self, server: _Server, reason: str, *, retry: bool = True) -> None:
        """Stop a server. Jobs whose program had not started are queued again, once. Idempotent."""
        # Several of its jobs may be overdue in one round.
        if server not in self._servers:
            return
        self._servers.remove(server)
        self._loop.unregister(server.process.control)
        errors = server.process.read_errors()
        server.process.stop()
        for job in server.jobs.values():
            self._unregister_pipes(job)
            if retry and not job.started_at and not job.future.done() and job.attempts < _MAX_ATTEMPTS:
                job.pipes.close()
                self._waiting.appendleft(job)
            else:
                job.fail(f"{reason}: {errors}" if errors else reason)
        if not self._closing:
            self._record_failed_start(f"{reason}: {errors}")

    def _receive(self, server: _Server) -> None:
        try:
            data = server.process.control.recv(messages.MAX_DATAGRAM_BYTES)
            if not data:
                self._end_server(server, "the fork server died")
                return
            self._handle(server, messages.decode(data))
        except BlockingIOError:
            return
        except (OSError, messages.MessageError) as error:
            self._end_server(server, f"the fork server is broken: {error}")

    def _handle(self, server: _Server, message: messages.Message) -> None:
        job = server.jobs.get(getattr(message, "job_id", -1))
        if isinstance(message, Ready):
            server.ready = self.last_ready = message
            for each in message.missing:
                _logger.warning("the sandbox cannot preload %s", each)
        elif isinstance(message, Started) and job:
            job.begin(message.warm_rss_kb)
            self._failed_starts = 0
        elif isinstance(message, Exited) and job:
            del server.jobs[job.id]
            self._unregister_pipes(job)
            job.complete(message)

    def _send(self, server: _Server, message: messages.Message, files: list[int] | None = None) -> None:
        try:
            server.send(message, files)
        except OSError as error:
            self._end_server(server, f"the fork server receives no messages: {error}")

    # Jobs

    def _accept(self, job: Job) -> None:
        if self._closing:
            job.fail(_CLOSED)
        else:
            self._waiting.append(job)

    def _kill(self, job: Job, number: int) -> None:
        if job in self._waiting:
            self._waiting.remove(job)
            job.fail("the run was cancelled before it started")
        for server in self._servers:
            if job.id in server.jobs:
                self._send(server, Signal(job.id, number))

    def _assign(self, job: Job, server: _Server) -> None:
        if job.future.cancelled():
            return
        job.attempts += 1
        job.sent_at = time.monotonic()
        job.started_at = 0.0
        try:
            files = job.open_files()
        except OSError as error:
            job.fail(f"cannot open the files of the run: {error}")
            return
        server.jobs[job.id] = job
        for fd in job.pipes:
            self._loop.register(fd, functools.partial(self._read_output, server, job, fd))
        self._send(server, job.limits.build_launch(job.id, session=job.session_fds is not None), files)
        for fd in files:
            os.close(fd)

    def _read_output(self, server: _Server, job: Job, fd: int) -> None:
        # An earlier callback of the same round may have closed the pipe.
        if fd not in job.pipes:
            return
        more = job.pipes.read(fd, job.output)
        if job.output.truncated:
            self._unregister_pipes(job)
            self._send(server, Signal(job.id, signal.SIGKILL))
        elif not more:
            self._loop.unregister(fd)
            job.pipes.close_fd(fd)

    def _unregister_pipes(self, job: Job) -> None:
        for fd in job.pipes:
            with contextlib.suppress(KeyError):
                self._loop.unregister(fd)
