"""One run as the supervisor sees it: its files, its output so far, and the verdict."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import Future
from typing import Final

from attrs import define, field, frozen

from turnwise_python_sandbox.box.messages import Ended, Launch
from turnwise_python_sandbox.box.program import OUT_OF_MEMORY_SIGNAL
from turnwise_python_sandbox.result import RunResult, Status, Tier

READ_BYTES: Final = 65536
_MIB: Final = 2**20
_KIB_PER_MIB: Final = 1024
_SESSION_S: Final = 1e6


@frozen(kw_only=True)
class Limits:
    """
    What one run may use.

    Attributes:
        timeout_s: wall-clock seconds.
        memory_mb: MiB beyond the warm interpreter.
        max_output_bytes: of both streams together.
        cpu_s: processor seconds.
        disk_mb: MiB of files.
        max_files: number of files.
    """

    timeout_s: float
    memory_mb: int
    max_output_bytes: int
    cpu_s: int
    disk_mb: int
    max_files: int

    def launch(self, job: int, *, session: bool) -> Launch:
        """Return the message that starts a run with these limits."""
        # A session ends by its owner's clock, which knows when it is idle.
        wall_s = _SESSION_S if session else self.timeout_s
        return Launch(job, wall_s, self.cpu_s, self.memory_mb * _MIB, self.disk_mb * _MIB, self.max_files, session)


@define(eq=False)
class Output:
    """
    What a program printed, up to a limit for both streams together.

    Attributes:
        limit: bytes that are kept.
        over: more came than that.
    """

    limit: int
    over: bool = False
    _streams: dict[str, bytearray] = field(factory=lambda: {"stdout": bytearray(), "stderr": bytearray()})

    @property
    def size(self) -> int:
        """Bytes kept so far."""
        return sum(map(len, self._streams.values()))

    def add(self, stream: str, data: bytes) -> None:
        """Keep what fits."""
        room = self.limit - self.size
        self.over = self.over or len(data) > room
        self._streams[stream] += data[:room]

    def text(self, stream: str) -> str:
        """Return a stream as text; what is no UTF-8, or was cut in mid-character, is replaced."""
        return self._streams[stream].decode("utf-8", "replace")


@define(eq=False)
class Job:
    """
    A run from its submission to its answer.

    Attributes:
        number: its name in messages, unique to its supervisor.
        code: the source, UTF-8.
        stdin: what it reads on standard input.
        limits: what it may use.
        tier: what isolates it.
        answer: where the result goes; cancelling it kills the run.
        session: for a session its own files: the stream that brings code, output and errors; None for a single run.
        killed: a session that was left idle for too long, and is being ended.
        idle_since: monotonic seconds of a session's last call; in the far future while one runs.
        attempts: servers that it was given to.
        submitted_at, sent_at, began_at: monotonic seconds; 0.0 until then.
    """

    number: int
    code: bytes
    stdin: bytes
    limits: Limits
    tier: Tier
    answer: Future[RunResult] = field(factory=Future)
    session: tuple[int, int, int] | None = None
    killed: bool = False
    idle_since: float = 0.0
    attempts: int = 0
    submitted_at: float = field(factory=time.monotonic)
    sent_at: float = 0.0
    began_at: float = 0.0
    output: Output = field(init=False)
    pipes: dict[int, str] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Start with no output."""
        self.output = Output(self.limits.max_output_bytes)

    def open_files(self) -> list[int]:
        """Return what goes to the server: code, standard input, output, errors. The caller closes these."""
        self.close_pipes()
        if self.session is not None:
            code, *outputs = map(os.dup, self.session)
            return [code, sealed_file(b""), *outputs]
        sent = [sealed_file(self.code), sealed_file(self.stdin)]
        for stream in ("stdout", "stderr"):
            ours, theirs = os.pipe()
            os.set_blocking(ours, False)
            self.pipes[ours] = stream
            sent.append(theirs)
        return sent

    def read(self, fd: int) -> bool:
        """Take what a pipe holds now; return False at its end."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return True
        self.output.add(self.pipes[fd], data)
        return bool(data)

    def drain(self) -> None:
        """Take what is left in the pipes of a program that has ended."""
        for fd in self.pipes:
            with contextlib.suppress(BlockingIOError):
                while data := os.read(fd, READ_BYTES):
                    self.output.add(self.pipes[fd], data)
                    if self.output.over:
                        break

    def close_pipes(self) -> None:
        """Close our ends."""
        while self.pipes:
            os.close(self.pipes.popitem()[0])

    def finish(self, ended: Ended) -> None:
        """Answer with the verdict on a program that has ended."""
        self.drain()
        status = verdict(ended, began=bool(self.began_at), output_over=self.output.over, limits=self.limits)
        stderr = self.output.text("stderr")
        if status is Status.INFRA_ERROR:
            stderr = f"{ended.error or 'the program could not be confined'}\n{stderr}".strip()
        code = os.waitstatus_to_exitcode(ended.wait_status) if ended.wait_status >= 0 else None
        self._answer(
            status=status,
            stderr=stderr,
            exit_code=code if code is None or code >= 0 else 128 - code,
            wall_s=ended.wall_s,
            cpu_s=ended.cpu_s,
            max_rss_kb=ended.max_rss_kb,
        )

    def fail(self, reason: str) -> None:
        """Answer that the sandbox failed."""
        self._answer(status=Status.INFRA_ERROR, stderr=reason)

    def time_out(self) -> None:
        """Answer for a server that is late: the program's time is over by the supervisor's own clock."""
        self.drain()
        wall_s = time.monotonic() - self.began_at
        self._answer(status=Status.TIMEOUT, stderr=self.output.text("stderr"), exit_code=137, wall_s=wall_s)

    def _answer(self, *, status: Status, stderr: str, **known: float | int | None) -> None:
        self.close_pipes()
        queued_s = (self.sent_at or time.monotonic()) - self.submitted_at
        result = RunResult(
            status=status,
            stdout=self.output.text("stdout"),
            stderr=stderr,
            tier=self.tier,
            queued_s=queued_s,
            **known,  # type: ignore[arg-type]
        )
        self.settle(result)

    def settle(self, result: RunResult) -> None:
        """Answer, unless somebody cancelled or it was answered before."""
        if not self.answer.done() and self.answer.set_running_or_notify_cancel():
            self.answer.set_result(result)


def verdict(ended: Ended, *, began: bool, output_over: bool, limits: Limits) -> Status:
    """
    Return how a run ended, from what the server saw.

    Args:
        ended: the server's account.
        began: the program's confinement was complete and its code started.
        output_over: it printed more than it may.
        limits: what it was allowed.
    """
    if not began or ended.wait_status < 0:
        return Status.INFRA_ERROR
    causes = {"wall": Status.TIMEOUT, "disk": Status.DISK_LIMIT}
    if output_over:
        return Status.OUTPUT_LIMIT
    if ended.cause in causes:
        return causes[ended.cause]
    if os.WIFSIGNALED(ended.wait_status):
        return _verdict_on_signal(os.WTERMSIG(ended.wait_status), ended, limits)
    if ended.wait_status == 0:
        return Status.OK
    return Status.DISK_LIMIT if ended.disk_full else Status.ERROR


def _verdict_on_signal(number: int, ended: Ended, limits: Limits) -> Status:
    if number == OUT_OF_MEMORY_SIGNAL:
        return Status.MEMORY
    if number == signal.SIGXCPU or (number == signal.SIGKILL and ended.cpu_s >= limits.cpu_s):
        return Status.TIMEOUT
    if number == signal.SIGXFSZ:
        return Status.DISK_LIMIT
    # Nobody but the kernel, or the program itself, sends this one without a cause.
    starved = number == signal.SIGKILL and ended.max_rss_kb >= limits.memory_mb * _KIB_PER_MIB // 2
    return Status.MEMORY if starved else Status.CRASHED


def sealed_file(content: bytes) -> int:
    """Return a descriptor, at its beginning, of a nameless file that nobody can change."""
    if sys.platform != "linux":
        return _plain_file(content)
    fd = os.memfd_create("turnwise", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    write_all(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    _seal(fd)
    return fd


def _seal(fd: int) -> None:
    import fcntl

    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)


def _plain_file(content: bytes) -> int:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        return os.dup(file.fileno())


def write_all(fd: int, data: bytes) -> None:
    """Write all of the data, in as many calls as it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
