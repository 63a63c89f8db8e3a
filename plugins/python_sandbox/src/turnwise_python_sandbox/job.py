"""One run, from its submission to its result."""

from __future__ import annotations

import itertools
import os
import time
from concurrent.futures import Future
from typing import Final

from attrs import define, field

from turnwise_python_sandbox.box.messages import Exited
from turnwise_python_sandbox.limits import Limits
from turnwise_python_sandbox.output import CapturedOutput, OutputPipes
from turnwise_python_sandbox.result import RunResult, Status, Tier
from turnwise_python_sandbox.sealed_file import create_sealed_file
from turnwise_python_sandbox.verdict import determine_status

_KILLED_EXIT_CODE: Final = 137
_SIGNAL_OFFSET: Final = 128
_ids: Final = itertools.count(1)


@define(eq=False)
class Job:
    """
    One run, from its submission to its result.

    Attributes:
        code: the source, UTF-8.
        stdin: bytes of its standard input.
        limits: limits of the run.
        tier: kind of isolation.
        id: identifies the job in messages; unique in this process.
        future: receives the result; cancelling it cancels the run.
        start: resolved when the program has started, or never will.
        session_fds: for a session, its files: the stream of code, standard output, standard error. None for a run.
        killed: the supervisor is ending this idle session.
        idle_since: for a session, monotonic seconds of the end of its last call; infinite during a call.
        attempts: number of servers that received it.
        warm_rss_kb: resident memory from the warm interpreter, KiB.
        submitted_at, sent_at, started_at: monotonic seconds; 0.0 until then.
        output: the output so far.
        pipes: read ends of the output pipes.
    """

    code: bytes
    stdin: bytes
    limits: Limits
    tier: Tier
    id: int = field(factory=lambda: next(_ids))
    future: Future[RunResult] = field(factory=Future)
    start: Future[None] = field(factory=Future)
    session_fds: tuple[int, int, int] | None = None
    killed: bool = False
    idle_since: float = 0.0
    attempts: int = 0
    warm_rss_kb: int = 0
    submitted_at: float = field(factory=time.monotonic)
    sent_at: float = 0.0
    started_at: float = 0.0
    output: CapturedOutput = field(init=False)
    pipes: OutputPipes = field(init=False, factory=OutputPipes)

    def __attrs_post_init__(self) -> None:
        """Create the empty output."""
        self.output = CapturedOutput(self.limits.max_output_bytes)

    def open_files(self) -> list[int]:
        """Return descriptors for the server: code, standard input, output, error. The caller closes them."""
        self.pipes.close()
        files: list[int] = []
        try:
            if self.session_fds is not None:
                for fd in self.session_fds:
                    files.append(os.dup(fd))
                return [files[0], create_sealed_file(b""), *files[1:]]
            for content in (self.code, self.stdin):
                files.append(create_sealed_file(content))
            return [*files, *self.pipes.open()]
        except BaseException:
            self.pipes.close()
            for fd in files:
                os.close(fd)
            raise

    def begin(self, warm_rss_kb: int) -> None:
        """Note that the program has started, with this much memory from the warm interpreter."""
        self.started_at = self.idle_since = time.monotonic()
        self.warm_rss_kb = warm_rss_kb
        self._resolve_start()

    def complete(self, exited: Exited) -> None:
        """Resolve the job of a program that has exited."""
        self.pipes.drain(self.output)
        status = determine_status(
            exited._replace(max_rss_kb=exited.max_rss_kb - self.warm_rss_kb),
            started=bool(self.started_at),
            output_truncated=self.output.truncated,
            limits=self.limits,
        )
        stderr = self.output.text("stderr")
        if status is Status.INFRA_ERROR:
            stderr = f"{exited.error or 'the program could not be confined'}\n{stderr}".strip()
        code = os.waitstatus_to_exitcode(exited.wait_status) if exited.wait_status >= 0 else None
        self._resolve_with(
            status=status,
            stderr=stderr,
            # Python reports a signal as a negative number, a shell as 128 plus the signal.
            exit_code=code if code is None or code >= 0 else _SIGNAL_OFFSET - code,
            wall_s=exited.wall_s,
            cpu_s=exited.cpu_s,
            max_rss_kb=exited.max_rss_kb,
        )

    def fail(self, reason: str) -> None:
        """Resolve the job with `infra_error`."""
        self._resolve_with(status=Status.INFRA_ERROR, stderr=reason)

    def time_out(self) -> None:
        """Resolve the job with `timeout` although the server has not reported its exit."""
        self.pipes.drain(self.output)
        wall_s = time.monotonic() - self.started_at
        self._resolve_with(
            status=Status.TIMEOUT, stderr=self.output.text("stderr"), exit_code=_KILLED_EXIT_CODE, wall_s=wall_s
        )

    def resolve(self, result: RunResult) -> None:
        """Set the result, unless the future has one or was cancelled."""
        self._resolve_start()
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_result(result)

    def _resolve_start(self) -> None:
        if not self.start.done():
            self.start.set_result(None)

    def _resolve_with(self, *, status: Status, stderr: str, **measured: float | int | None) -> None:
        self.pipes.close()
        queued_s = (self.sent_at or time.monotonic()) - self.submitted_at
        result = RunResult(
            status=status,
            stdout=self.output.text("stdout"),
            stderr=stderr,
            tier=self.tier,
            queued_s=queued_s,
            **measured,  # type: ignore[arg-type]  # callers name the fields
        )
        self.resolve(result)
