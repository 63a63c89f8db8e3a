"""Interpreters that keep their variables between calls."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from types import TracebackType
from typing import Final, Self

from attrs import evolve

from turnwise_python_sandbox.box.frames import FrameError
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.output import CapturedOutput
from turnwise_python_sandbox.result import RunResult, Status
from turnwise_python_sandbox.session_interpreter import InterpreterExitedError, SessionInterpreter
from turnwise_python_sandbox.supervisor import Supervisor

_START_TIMEOUT_S: Final = 60.0
_INTERRUPT_S: Final = 0.4
"""Between the interrupt at the time limit and the kill."""
_EXIT_TIMEOUT_S: Final = 5.0
"""Between the end of an interpreter's stream and the server's `Exited`."""


class Session:
    """
    An interpreter that keeps its variables between calls; it runs one call at a time.

    At the time limit of a call the code is interrupted by `KeyboardInterrupt`, which keeps the variables. If it does
    not stop, the interpreter is killed, and the next call starts a new one.
    """

    def __init__(self, supervisor: Supervisor, config: SandboxConfig) -> None:
        self._supervisor = supervisor
        self._config = config
        self._lock = threading.Lock()
        """Held by the running call."""
        self._interpreter: SessionInterpreter | None = None

    def run(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        """Run code with the variables of the earlier calls; see `Sandbox.run`."""
        with self._lock:
            try:
                return self._call(code.encode("utf-8", "surrogatepass"), timeout_s or self._config.timeout_s)
            except OSError as error:
                self._discard_interpreter()
                return self._build_lost_result(Status.INFRA_ERROR, stderr=f"{type(error).__name__}: {error}")

    async def arun(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        """Call `run` on a thread; cancelling it kills the interpreter."""
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._supervisor.session_threads, lambda: self.run(code, timeout_s=timeout_s))
        try:
            return await call
        except asyncio.CancelledError:
            self._kill_interpreter()
            raise

    def close(self) -> None:
        """End the interpreter. Idempotent."""
        # Kill first: a running call holds the lock until its interpreter is dead.
        self._kill_interpreter()
        with self._lock:
            self._discard_interpreter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, code: bytes, timeout_s: float) -> RunResult:
        output = CapturedOutput(self._config.max_output_bytes)
        interpreter = self._get_interpreter()
        interpreter.job.idle_since = math.inf
        started_at = time.monotonic()
        try:
            interpreter.send(code, timeout_s)
            reply = interpreter.wait_for_reply(output, started_at + timeout_s)
            if reply is None:
                return self._stop_call(interpreter, output, started_at)
        except TimeoutError:
            # A thread of an earlier call keeps the interpreter from reading.
            return self._stop_call(interpreter, output, started_at)
        except (InterpreterExitedError, ConnectionError):
            return self._handle_exit(interpreter, output, started_at)
        except FrameError as error:
            # Only code in the session can send a bad frame, so this is not the sandbox's failure.
            self._discard_interpreter()
            return self._build_lost_result(Status.CRASHED, output, started_at, stderr=f"the session is broken: {error}")
        interpreter.job.idle_since = time.monotonic()
        return self._build_result(Status.ERROR if reply else Status.OK, output, started_at, exit_code=reply)

    def _get_interpreter(self) -> SessionInterpreter:
        """Return the live interpreter, or start one; raise `OSError` if it does not start."""
        if self._interpreter is not None and not self._interpreter.job.future.done():
            return self._interpreter
        self._discard_interpreter()
        # Set before the wait, so that `close` on another thread can kill an interpreter that is still starting.
        interpreter = self._interpreter = SessionInterpreter.create(self._config, self._supervisor.tier)
        self._supervisor.submit(interpreter.job)
        try:
            first_reply = interpreter.wait_for_reply(CapturedOutput(0), time.monotonic() + _START_TIMEOUT_S)
        except InterpreterExitedError:
            first_reply = None
        interpreter.close_passed_fds()
        if first_reply is None:
            self._discard_interpreter()
            future = interpreter.job.future
            reason = future.result().stderr if future.done() else "it did not start in time"
            raise OSError(f"no interpreter for the session: {reason}")
        return interpreter

    def _stop_call(self, interpreter: SessionInterpreter, output: CapturedOutput, started_at: float) -> RunResult:
        """End a call at its time limit or output limit; kill the interpreter unless an interrupt stops the call."""
        status = Status.OUTPUT_LIMIT if output.truncated else Status.TIMEOUT
        if status is Status.TIMEOUT:
            self._supervisor.kill(interpreter.job, signal.SIGINT)
            try:
                if interpreter.wait_for_reply(output, time.monotonic() + _INTERRUPT_S) is not None:
                    interpreter.job.idle_since = time.monotonic()
                    return self._build_result(status, output, started_at, exit_code=None)
            except (InterpreterExitedError, FrameError):
                pass
        interpreter.pipes.drain(output)
        self._discard_interpreter()
        return self._build_lost_result(status, output, started_at)

    def _handle_exit(self, interpreter: SessionInterpreter, output: CapturedOutput, started_at: float) -> RunResult:
        """Return the result of a call during which the interpreter exited."""
        interpreter.pipes.drain(output)
        try:
            last = interpreter.job.future.result(timeout=_EXIT_TIMEOUT_S)
        except TimeoutError:
            last = self._build_lost_result(
                Status.INFRA_ERROR, stderr="the interpreter exited, but its fork server did not report how"
            )
        self._discard_interpreter()
        # The call did not reply, so it failed even if the process exited with code 0.
        status = Status.ERROR if last.status is Status.OK else last.status
        stderr = last.stderr if status is Status.INFRA_ERROR else ""
        return self._build_lost_result(status, output, started_at, stderr=stderr, exit_code=last.exit_code)

    def _build_lost_result(
        self,
        status: Status,
        output: CapturedOutput | None = None,
        started_at: float | None = None,
        *,
        stderr: str = "",
        exit_code: int | None = None,
    ) -> RunResult:
        started_at = time.monotonic() if started_at is None else started_at
        result = self._build_result(status, output or CapturedOutput(0), started_at, exit_code=exit_code)
        return evolve(result, stderr=result.stderr + stderr, session_lost=True)

    def _build_result(
        self, status: Status, output: CapturedOutput, started_at: float, *, exit_code: int | None
    ) -> RunResult:
        return RunResult(
            status=status,
            stdout=output.text("stdout"),
            stderr=output.text("stderr"),
            exit_code=exit_code,
            wall_s=time.monotonic() - started_at,
            tier=self._supervisor.tier,
        )

    def _kill_interpreter(self) -> None:
        interpreter = self._interpreter
        if interpreter is not None and not interpreter.job.future.done():
            self._supervisor.kill(interpreter.job)

    def _discard_interpreter(self) -> None:
        self._kill_interpreter()
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            interpreter.close()
