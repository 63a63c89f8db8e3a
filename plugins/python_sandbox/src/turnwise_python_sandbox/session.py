"""An interpreter that lives on between calls: one process, one set of names."""

from __future__ import annotations

import asyncio
import json
import math
import os
import select
import signal
import socket
import threading
import time
from types import TracebackType
from typing import Final, Self

from attrs import define, evolve, field

from turnwise_python_sandbox.box.frames import FrameError, FrameReader, frame
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.job import READ_BYTES, Job, Limits, Output
from turnwise_python_sandbox.result import RunResult, Status, Tier
from turnwise_python_sandbox.supervisor import Supervisor

_BEGIN_S: Final = 60.0
_INTERRUPT_S: Final = 0.4
"""Between the polite interrupt at the limit and the kill."""
_REAP_S: Final = 5.0
_MAX_REPLY_BYTES: Final = 256
_CPU_S: Final = 3600


class _EndedError(Exception):
    """The interpreter closed its stream: it is gone."""


@define(eq=False)
class _Live:
    """
    One interpreter: its job, and our ends of its files.

    Attributes:
        job: the supervisor's view of it.
        stream: code goes out, exit codes come back.
        pipes: descriptor to name of what it prints to.
        theirs: its own ends, open here until it has them.
    """

    job: Job
    stream: socket.socket
    pipes: dict[int, str]
    theirs: list[int]
    reader: FrameReader = field(factory=lambda: FrameReader(_MAX_REPLY_BYTES))

    def next_reply(self, output: Output, until: float) -> int | None:
        """
        Keep what it prints until it answers; return the exit code, or None when it is late or too loud.

        Raises:
            _EndedError: it is gone.
        """
        poll = select.poll()
        for fd in (self.stream.fileno(), *self.pipes):
            poll.register(fd, select.POLLIN)
        while not output.over and (left_s := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(min(left_s, 1.0) * 1000):
                if fd in self.pipes:
                    if not self._read(fd, output):
                        poll.unregister(fd)
                else:
                    reply = self._receive()
                    if reply is not None:
                        self.drain(output)
                        return reply
        return None

    def _receive(self) -> int | None:
        data = self.stream.recv(READ_BYTES)
        if not data:
            raise _EndedError
        for payload in self.reader.feed(data):
            return _exit_code(payload)
        return None

    def _read(self, fd: int, output: Output) -> bool:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return True
        output.add(self.pipes[fd], data)
        return bool(data)

    def drain(self, output: Output) -> None:
        """Keep what is in the pipes now."""
        for fd in self.pipes:
            while not output.over:
                before = output.size
                self._read(fd, output)
                if output.size == before:
                    break

    def close_theirs(self) -> None:
        """Let go of the ends that the interpreter has by now."""
        while self.theirs:
            os.close(self.theirs.pop())

    def close(self) -> None:
        """Close everything."""
        self.close_theirs()
        self.stream.close()
        while self.pipes:
            os.close(self.pipes.popitem()[0])


def _exit_code(payload: bytes) -> int:
    """Read a reply, which model code may have forged: it tells an error from none, and decides nothing else."""
    try:
        code = json.loads(payload)["exit_code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return 1
    return code & 0xFF if isinstance(code, int) else 1


class Session:
    """
    A live interpreter; calls take turns.

    At a call's time limit the code gets an interrupt (`KeyboardInterrupt`), which keeps its names, and is killed when
    that does not help; every later call then starts a new interpreter.
    """

    def __init__(self, supervisor: Supervisor, tier: Tier, config: SandboxConfig) -> None:
        self._supervisor = supervisor
        self._tier = tier
        self._config = config
        self._turn = threading.Lock()
        self._live: _Live | None = None

    def run(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        """Run code where the last call left off; see `Sandbox.run`."""
        with self._turn:
            try:
                return self._call(code.encode("utf-8", "surrogatepass"), timeout_s or self._config.timeout_s)
            except OSError as error:
                self._drop()
                return self._lost(Status.INFRA_ERROR, stderr=f"{type(error).__name__}: {error}")

    async def arun(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        """Do as `run` on a thread; cancelling it kills the interpreter."""
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._supervisor.calls, lambda: self.run(code, timeout_s=timeout_s))
        try:
            return await call
        except asyncio.CancelledError:
            self._kill()
            raise

    def close(self) -> None:
        """End the interpreter. Idempotent."""
        self._kill()
        with self._turn:
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, code: bytes, timeout_s: float) -> RunResult:
        output = Output(self._config.max_output_bytes)
        live = self._open()
        live.job.idle_since = math.inf
        began_at = time.monotonic()
        try:
            live.stream.settimeout(timeout_s)
            live.stream.sendall(frame(code))
            reply = live.next_reply(output, began_at + timeout_s)
            if reply is None:
                return self._stop(live, output, began_at)
        except TimeoutError:
            # Code of an earlier call keeps the interpreter from reading.
            return self._stop(live, output, began_at)
        except (_EndedError, ConnectionError):
            return self._ended(live, output, began_at)
        except FrameError as error:
            # Only code in the session can do this, so it is no failure of ours.
            self._drop()
            return self._lost(Status.CRASHED, output, began_at, stderr=f"the session is broken: {error}")
        live.job.idle_since = time.monotonic()
        return self._result(Status.ERROR if reply else Status.OK, output, began_at, exit_code=reply)

    def _open(self) -> _Live:
        """Return the live interpreter, or start one; `OSError` when none can be had."""
        if self._live is not None and not self._live.job.answer.done():
            return self._live
        self._drop()
        live = self._live = _make_live(self._supervisor.number(), self._config, self._tier)
        self._supervisor.submit(live.job)
        try:
            hello = live.next_reply(Output(0), time.monotonic() + _BEGIN_S)
        except _EndedError:
            hello = None
        live.close_theirs()
        if hello is None:
            self._drop()
            reason = live.job.answer.result().stderr if live.job.answer.done() else "it did not start in time"
            raise OSError(f"no interpreter for the session: {reason}")
        return live

    def _stop(self, live: _Live, output: Output, began_at: float) -> RunResult:
        """End a call that is late or too loud, and the interpreter with it when an interrupt does not help."""
        status = Status.OUTPUT_LIMIT if output.over else Status.TIMEOUT
        if status is Status.TIMEOUT:
            self._supervisor.kill(live.job, signal.SIGINT)
            try:
                if live.next_reply(output, time.monotonic() + _INTERRUPT_S) is not None:
                    live.job.idle_since = time.monotonic()
                    return self._result(status, output, began_at, exit_code=None)
            except (_EndedError, FrameError):
                pass
        live.drain(output)
        self._drop()
        return self._lost(status, output, began_at)

    def _ended(self, live: _Live, output: Output, began_at: float) -> RunResult:
        """Give the verdict on an interpreter that ended by itself in mid-call."""
        live.drain(output)
        try:
            last = live.job.answer.result(timeout=_REAP_S)
        except TimeoutError:
            last = self._lost(Status.INFRA_ERROR, stderr="the session ended and nobody knows how")
        self._drop()
        # The process ended in mid-call, so not even exit code 0 is an answer.
        status = Status.ERROR if last.status is Status.OK else last.status
        stderr = last.stderr if status is Status.INFRA_ERROR else ""
        return self._lost(status, output, began_at, stderr=stderr, exit_code=last.exit_code)

    def _lost(
        self,
        status: Status,
        output: Output | None = None,
        began_at: float | None = None,
        *,
        stderr: str = "",
        exit_code: int | None = None,
    ) -> RunResult:
        began_at = time.monotonic() if began_at is None else began_at
        result = self._result(status, output or Output(0), began_at, exit_code=exit_code)
        return evolve(result, stderr=result.stderr + stderr, session_lost=True)

    def _result(self, status: Status, output: Output, began_at: float, *, exit_code: int | None) -> RunResult:
        return RunResult(
            status=status,
            stdout=output.text("stdout"),
            stderr=output.text("stderr"),
            exit_code=exit_code,
            wall_s=time.monotonic() - began_at,
            tier=self._tier,
        )

    def _kill(self) -> None:
        live = self._live
        if live is not None and not live.job.answer.done():
            self._supervisor.kill(live.job)

    def _drop(self) -> None:
        self._kill()
        live, self._live = self._live, None
        if live is not None:
            live.close()


def _make_live(number: int, config: SandboxConfig, tier: Tier) -> _Live:
    limits = Limits(
        timeout_s=config.session_idle_s,
        memory_mb=config.memory_mb,
        max_output_bytes=0,
        cpu_s=_CPU_S,
        disk_mb=config.disk_mb,
        max_files=config.max_files,
    )
    ours, theirs = socket.socketpair()
    pipes, ends = {}, [theirs.detach()]
    for stream in ("stdout", "stderr"):
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        pipes[reading] = stream
        ends.append(writing)
    job = Job(number=number, code=b"", stdin=b"", limits=limits, tier=tier, session=(ends[0], ends[1], ends[2]))
    return _Live(job=job, stream=ours, pipes=pipes, theirs=ends)
