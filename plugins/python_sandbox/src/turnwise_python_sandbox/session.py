"""Interpreters that keep their variables between calls."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import threading
import time
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Self

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
        """Protects the fields below; never held while anything is waited for."""
        self._last_turn: Future[None] = Future()
        """Resolved when the call that came last has ended."""
        self._last_turn.set_result(None)
        self._num_closing = 0
        self._interpreter: SessionInterpreter | None = None

    def run(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        """Run code with the variables of the earlier calls; see `Sandbox.run`."""
        before, turn = self._take_turn()
        try:
            before.result()
            return self._run_in_turn(code, timeout_s)
        finally:
            _resolve_after(before, turn)

    async def arun(self, code: str, *, timeout_s: float | None = None) -> RunResult:
        """Do the same as `run` without blocking the event loop; cancelling it kills the interpreter."""
        before, turn = self._take_turn()
        last: Future[Any] = before
        try:
            await asyncio.shield(asyncio.wrap_future(before))
            # Sessions that wait for a place must not hold the threads that the calls of others need.
            await self._wait_for_place()
            call = self._supervisor.session_threads.submit(self._run_in_turn, code, timeout_s)
            last = call
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            self._kill_interpreter()
            raise
        except (OSError, RuntimeError) as error:
            # Being closed: the session itself, or the threads of its sandbox.
            return self._build_lost_result(Status.INFRA_ERROR, stderr=f"{type(error).__name__}: {error}")
        finally:
            _resolve_after(last, turn)

    def close(self) -> None:
        """End the interpreter and the running call, and wait for that. Idempotent."""
        self._begin_close().result()

    async def aclose(self) -> None:
        """Do the same as `close` without blocking the event loop; the session ends also if this is cancelled."""
        await asyncio.shield(asyncio.wrap_future(self._begin_close()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    def _take_turn(self, *, closing: bool = False) -> tuple[Future[None], Future[None]]:
        """Return the turn before the caller's, and the caller's own, which the caller resolves after that one."""
        turn: Future[None] = Future()
        with self._lock:
            before, self._last_turn = self._last_turn, turn
            self._num_closing += closing
        return before, turn

    def _begin_close(self) -> Future[None]:
        before, turn = self._take_turn(closing=True)
        # Kill first: the call before ends as soon as its interpreter is dead.
        self._kill_interpreter()

        def finish(_: Future[None]) -> None:
            self._discard_interpreter()
            with self._lock:
                self._num_closing -= 1
            turn.set_result(None)

        before.add_done_callback(finish)
        return turn

    async def _wait_for_place(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_TIMEOUT_S):
                await asyncio.shield(asyncio.wrap_future(self._provide_interpreter().job.start))

    def _run_in_turn(self, code: str, timeout_s: float | None) -> RunResult:
        try:
            return self._call(code.encode("utf-8", "surrogatepass"), timeout_s or self._config.timeout_s)
        except OSError as error:
            self._discard_interpreter()
            return self._build_lost_result(Status.INFRA_ERROR, stderr=f"{type(error).__name__}: {error}")

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

    def _provide_interpreter(self) -> SessionInterpreter:
        """Return the live interpreter, or submit one; raise `OSError` if the session is being closed."""
        interpreter = self._interpreter
        if interpreter is not None and (not interpreter.ready or not interpreter.job.future.done()):
            return interpreter
        self._discard_interpreter()
        with self._lock:
            if self._num_closing:
                raise OSError("the session was closed")
            # Submitted under the lock, so that `close` on another thread finds it and kills it.
            interpreter = self._interpreter = SessionInterpreter.create(self._config, self._supervisor.tier)
            self._supervisor.submit(interpreter.job)
        return interpreter

    def _get_interpreter(self) -> SessionInterpreter:
        """Return the live interpreter, or start one; raise `OSError` if it does not start."""
        interpreter = self._provide_interpreter()
        if interpreter.ready:
            return interpreter
        try:
            deadline = interpreter.job.submitted_at + _START_TIMEOUT_S
            first_reply = interpreter.wait_for_reply(CapturedOutput(0), deadline)
        except InterpreterExitedError:
            first_reply = None
        interpreter.close_passed_fds()
        if first_reply is None:
            self._discard_interpreter()
            future = interpreter.job.future
            reason = future.result().stderr if future.done() else "it did not start in time"
            raise OSError(f"no interpreter for the session: {reason}")
        interpreter.ready = True
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
        with self._lock:
            interpreter = self._interpreter
        if interpreter is not None and not interpreter.job.future.done():
            self._supervisor.kill(interpreter.job)

    def _discard_interpreter(self) -> None:
        self._kill_interpreter()
        with self._lock:
            interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            interpreter.close()


def _resolve_after(last: Future[Any], turn: Future[None]) -> None:
    """Resolve a turn once what it waited for or did is over, also if its caller has been cancelled before."""
    last.add_done_callback(lambda _: turn.set_result(None))
