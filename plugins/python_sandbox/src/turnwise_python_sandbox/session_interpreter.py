"""The interpreter of a session: its job, and this process's ends of its stream and pipes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from typing import Final, Self

from attrs import define, field

from turnwise_python_sandbox.box.frames import FrameError, FrameReader, encode_frame
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.limits import Limits
from turnwise_python_sandbox.output import READ_BYTES, CapturedOutput, OutputPipes
from turnwise_python_sandbox.result import Tier

_MAX_REPLY_BYTES: Final = 256
_CPU_S: Final = 3600
_POLL_S: Final = 1.0
_UNASKED: Final = "a reply came without a call"


class InterpreterExitedError(Exception):
    """The interpreter closed its stream, so it has exited."""


@define(eq=False)
class SessionInterpreter:
    """
    One interpreter of a session.

    Attributes:
        job: its job at the supervisor.
        stream: carries code to the interpreter and exit codes back.
        pipes: read ends of its output pipes.
    """

    job: Job
    stream: socket.socket
    pipes: OutputPipes
    _passed_fds: list[int]
    ready: bool = False
    """It has sent its first reply."""
    num_calls: int = 0
    _closing: threading.Lock = field(init=False, factory=threading.Lock)
    """Keeps the descriptor from being another file's while another thread wakes a waiting call."""
    _reader: FrameReader = field(init=False, factory=lambda: FrameReader(_MAX_REPLY_BYTES))

    @classmethod
    def create(cls, config: SandboxConfig, tier: Tier) -> Self:
        """Open the files and create the job; the caller submits the job."""
        limits = Limits(
            timeout_s=config.session_idle_s,
            memory_mb=config.memory_mb,
            max_output_bytes=0,
            cpu_s=_CPU_S,
            disk_mb=config.disk_mb,
            max_files=config.max_files,
        )
        pipes = OutputPipes()
        stdout_fd, stderr_fd = pipes.open()
        try:
            ours, theirs = socket.socketpair()
        except BaseException:
            pipes.close()
            os.close(stdout_fd)
            os.close(stderr_fd)
            raise
        stream_fd = theirs.detach()
        job = Job(code=b"", stdin=b"", limits=limits, tier=tier, session_fds=(stream_fd, stdout_fd, stderr_fd))
        interpreter = cls(job, ours, pipes, [stream_fd, stdout_fd, stderr_fd])
        # A job that ends before its interpreter has started leaves both ends of the stream in this process.
        job.future.add_done_callback(lambda _: interpreter.end_stream())
        return interpreter

    def send(self, code: bytes, timeout_s: float) -> None:
        """
        Send the code of one call; raise `TimeoutError` if the interpreter does not read it in time.

        Raises:
            FrameError: a reply is there that no call has asked for, so code in the session has forged one.
        """
        poll = select.poll()
        poll.register(self.stream.fileno(), select.POLLIN)
        if self._reader.num_pending or (poll.poll(0) and self.stream.recv(READ_BYTES)):
            raise FrameError(_UNASKED)
        self.num_calls += 1
        self.stream.settimeout(timeout_s)
        self.stream.sendall(encode_frame(code))

    def wait_for_reply(self, output: CapturedOutput, deadline: float) -> int | None:
        """
        Collect output until the interpreter replies, and return the exit code of the call.

        Returns None once the deadline has passed or the output is at its limit.

        Raises:
            InterpreterExitedError: the interpreter has exited.
            FrameError: the reply is no frame of a legal length, or belongs to another call.
        """
        poll = select.poll()
        for fd in (self.stream.fileno(), *self.pipes):
            poll.register(fd, select.POLLIN)
        while not output.truncated and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(min(left_s, _POLL_S) * 1000):
                if fd in self.pipes:
                    if not self.pipes.read(fd, output):
                        poll.unregister(fd)
                elif (reply := self._receive_reply()) is not None:
                    # The interpreter flushes before it replies, so the rest of the output is in the pipes by now.
                    self.pipes.drain(output)
                    return reply
        return None

    def _receive_reply(self) -> int | None:
        data = self.stream.recv(READ_BYTES)
        if not data:
            raise InterpreterExitedError
        for payload in self._reader.feed(data):
            if not is_reply_to(payload, self.num_calls):
                raise FrameError(_UNASKED)
            return parse_exit_code(payload)
        return None

    def close_passed_fds(self) -> None:
        """Close the interpreter's ends in this process, after the interpreter has received them. Idempotent."""
        while self._passed_fds:
            os.close(self._passed_fds.pop())

    def end_stream(self) -> None:
        """Make a thread that waits for a reply see the end of the stream. Any thread may call this."""
        with self._closing, contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all files. Idempotent."""
        self.close_passed_fds()
        with self._closing:
            self.stream.close()
        self.pipes.close()


def is_reply_to(payload: bytes, call: int) -> bool:
    """Return False for a reply that names another call; model code that forges replies may name none."""
    try:
        named = json.loads(payload).get("call", call)
    except (ValueError, AttributeError, RecursionError):
        return True
    return bool(named == call)


def parse_exit_code(payload: bytes) -> int:
    """Return the exit code in a reply; 1 for a malformed reply, because model code may have forged it."""
    try:
        code = json.loads(payload)["exit_code"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return 1
    return code & 0xFF if isinstance(code, int) else 1
