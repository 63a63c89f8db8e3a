"""The public face: run code, get a `RunResult`, from any thread or event loop."""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import threading
import weakref
from types import TracebackType
from typing import Any, Final, Self

from attrs import evolve

from turnwise_python_sandbox import backend
from turnwise_python_sandbox.backend import Started
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.job import Job, Limits
from turnwise_python_sandbox.result import RunResult, SandboxUnavailableError, Tier
from turnwise_python_sandbox.session import Session
from turnwise_python_sandbox.supervisor import Supervisor


class Sandbox:
    r"""
    Runs Python code that nobody vouches for.

    It starts with the first run, or at the ``with`` statement, and one object serves all threads and event loops of
    a process. A forked child starts servers of its own.

    Args:
        config: how; `SandboxConfig()` when left out.
        changes: fields of the config to change, such as ``preload=("sympy",)``.

    Raises:
        SandboxUnavailableError: at the start: no isolation works here; the text says why and what would help.

    Example:
        >>> with Sandbox(timeout_s=5) as sandbox:  # doctest: +SKIP
        ...     sandbox.run("print(1 + 1)").stdout
        '2\n'
    """

    def __init__(self, config: SandboxConfig | None = None, **changes: Any) -> None:
        self.config = evolve(config or SandboxConfig(), **changes)
        self._lock = threading.Lock()
        self._started: Started | None = None
        self._closed = False
        _live.add(self)

    def start(self) -> Self:
        """Choose the tier and start. Idempotent; the first run does it by itself."""
        self._backend()
        return self

    @property
    def tier(self) -> Tier:
        """What isolates the runs; starts when it must."""
        return self._backend().tier

    def run(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        memory_mb: int | None = None,
        max_output_bytes: int | None = None,
        stdin: str = "",
    ) -> RunResult:
        """
        Run a program in a fresh interpreter and wait for its end.

        Never raises for what the program does, nor for a sandbox that fails: that is the status ``infra_error``.

        Args:
            code: the program, run as ``__main__``.
            timeout_s: wall-clock seconds from its start; the answer comes within one second more.
            memory_mb: MiB beyond the warm interpreter's own.
            max_output_bytes: of standard output and errors together.
            stdin: what it reads on standard input.

        Raises:
            SandboxUnavailableError: no isolation works here, or the sandbox was closed.
        """
        return self._submit(code, stdin, self._limits(timeout_s, memory_mb, max_output_bytes)).answer.result()

    async def arun(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        memory_mb: int | None = None,
        max_output_bytes: int | None = None,
        stdin: str = "",
    ) -> RunResult:
        """Do as `run` without blocking the event loop; cancelling it kills the program."""
        limits = self._limits(timeout_s, memory_mb, max_output_bytes)
        if self._started is None:
            # The self-test takes a while.
            await asyncio.to_thread(self.start)
        job = self._submit(code, stdin, limits)
        try:
            return await asyncio.wrap_future(job.answer)
        except asyncio.CancelledError:
            self._backend().backend.kill(job)
            raise

    async def asession(self) -> Session:
        """Do as `session` without blocking the event loop while the sandbox starts."""
        if self._started is None:
            await asyncio.to_thread(self.start)
        return self.session()

    def session(self) -> Session:
        """
        Return an interpreter that lives on between runs; close it in the end.

        Code in a session can tamper with its own later outputs, since they share a process; it is isolated from the
        host and from other sessions as a fresh run is.
        """
        started = self._backend()
        if not isinstance(started.backend, Supervisor):
            raise SandboxUnavailableError(f"tier {int(started.tier)} ({started.tier.name.lower()}) has no sessions")
        return Session(started.backend, started.tier, self.config)

    def close(self) -> None:
        """End every run, server and session. Idempotent."""
        with self._lock:
            self._closed = True
            started, self._started = self._started, None
        if started is not None:
            started.backend.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    def _backend(self) -> Started:
        with self._lock:
            if self._closed:
                raise SandboxUnavailableError("the sandbox was closed")
            if self._started is None:
                self._started = backend.start(self.config)
            return self._started

    def _submit(self, code: str, stdin: str, limits: Limits) -> Job:
        started = self._backend()
        job = Job(
            number=started.backend.number(),
            code=code.encode("utf-8", "surrogatepass"),
            stdin=stdin.encode("utf-8", "surrogatepass"),
            limits=limits,
            tier=started.tier,
        )
        started.backend.submit(job)
        return job

    def _limits(self, timeout_s: float | None, memory_mb: int | None, max_output_bytes: int | None) -> Limits:
        config = self.config
        timeout_s = config.timeout_s if timeout_s is None else timeout_s
        return Limits(
            timeout_s=timeout_s,
            memory_mb=config.memory_mb if memory_mb is None else memory_mb,
            max_output_bytes=config.max_output_bytes if max_output_bytes is None else max_output_bytes,
            cpu_s=math.ceil(2 * timeout_s if config.cpu_s is None else config.cpu_s),
            disk_mb=config.disk_mb,
            max_files=config.max_files,
        )

    def _forget(self) -> None:
        """In a forked child: the servers are the parent's."""
        self._lock = threading.Lock()
        started, self._started = self._started, None
        if started is not None:
            started.backend.forget()


_live: Final[weakref.WeakSet[Sandbox]] = weakref.WeakSet()
_shared: Final[dict[SandboxConfig, Sandbox]] = {}
_shared_lock: Final = threading.Lock()


def shared_sandbox(config: SandboxConfig) -> Sandbox:
    """Return the one sandbox that this process has for a config; it is closed when the process exits."""
    with _shared_lock:
        if config not in _shared:
            _shared[config] = Sandbox(config)
        return _shared[config]


@atexit.register
def _close_all() -> None:
    for sandbox in list(_live):
        sandbox.close()


def _forget_all() -> None:
    for sandbox in list(_live):
        sandbox._forget()  # noqa: SLF001 - the same module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
