"""The public API: run code and get a `RunResult`, on any thread or event loop."""

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

from turnwise_python_sandbox.backend import Backend, start_backend
from turnwise_python_sandbox.config import SandboxConfig
from turnwise_python_sandbox.job import Job
from turnwise_python_sandbox.limits import Limits
from turnwise_python_sandbox.result import RunResult, SandboxUnavailableError, Tier, format_tier
from turnwise_python_sandbox.session import Session
from turnwise_python_sandbox.supervisor import Supervisor


class Sandbox:
    r"""
    Runs untrusted Python code.

    The sandbox starts at the ``with`` statement or at the first run. One object serves all threads and event loops of
    a process. A forked child starts its own servers.

    Args:
        config: limits and isolation; the defaults of `SandboxConfig` if left out.
        changes: fields of the config to change, such as ``preload=("sympy",)``.

    Raises:
        SandboxUnavailableError: at the start, if no isolation works here; the text has the reasons and the hints.

    Example:
        >>> with Sandbox(timeout_s=5) as sandbox:  # doctest: +SKIP
        ...     sandbox.run("print(1 + 1)").stdout
        '2\n'
    """

    def __init__(self, config: SandboxConfig | None = None, **changes: Any) -> None:
        self.config = evolve(config or SandboxConfig(), **changes)
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self._closed = False
        _live.add(self)

    def start(self) -> Self:
        """Select the tier and start. Idempotent; the first run calls it."""
        self._get_backend()
        return self

    @property
    def tier(self) -> Tier:
        """The isolation of the runs; starts the sandbox if necessary."""
        return self._get_backend().tier

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
        Run a program in a new interpreter and wait for its end.

        Nothing that the program does raises. If the sandbox fails, the result has the status ``infra_error``.

        Args:
            code: the program, run as ``__main__``.
            timeout_s: wall-clock seconds from its start; the result comes at most one second later.
            memory_mb: MiB in addition to the warm interpreter's.
            max_output_bytes: of standard output and standard error together.
            stdin: text of its standard input.

        Raises:
            SandboxUnavailableError: no isolation works here, or the sandbox was closed.
        """
        return self._submit(code, stdin, self._build_limits(timeout_s, memory_mb, max_output_bytes)).future.result()

    async def arun(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        memory_mb: int | None = None,
        max_output_bytes: int | None = None,
        stdin: str = "",
    ) -> RunResult:
        """Do the same as `run` without blocking the event loop; cancelling it kills the program."""
        limits = self._build_limits(timeout_s, memory_mb, max_output_bytes)
        await self._start_on_thread()
        job = self._submit(code, stdin, limits)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            self._get_backend().kill(job)
            raise

    async def asession(self) -> Session:
        """Do the same as `session` without blocking the event loop while the sandbox starts."""
        await self._start_on_thread()
        return self.session()

    def session(self) -> Session:
        """
        Return an interpreter that keeps its variables between runs; the caller closes it.

        Code in a session can change the outputs of later calls, because they share a process. It is isolated from the
        host and from other sessions as a single run is.
        """
        backend = self._get_backend()
        if not isinstance(backend, Supervisor):
            raise SandboxUnavailableError(f"{format_tier(backend.tier)} has no sessions; use tier 1 or 2")
        return Session(backend, self.config)

    def close(self) -> None:
        """End every run, server and session. Idempotent."""
        with self._lock:
            self._closed = True
            backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    async def _start_on_thread(self) -> None:
        # The self-test takes about half a second.
        if self._backend is None:
            await asyncio.to_thread(self.start)

    def _get_backend(self) -> Backend:
        """Return the backend, and start it if necessary."""
        with self._lock:
            if self._closed:
                raise SandboxUnavailableError("the sandbox was closed")
            if self._backend is None:
                self._backend = start_backend(self.config)
            return self._backend

    def _submit(self, code: str, stdin: str, limits: Limits) -> Job:
        backend = self._get_backend()
        job = Job(
            code=code.encode("utf-8", "surrogatepass"),
            stdin=stdin.encode("utf-8", "surrogatepass"),
            limits=limits,
            tier=backend.tier,
        )
        backend.submit(job)
        return job

    def _build_limits(self, timeout_s: float | None, memory_mb: int | None, max_output_bytes: int | None) -> Limits:
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

    def _detach_after_fork(self) -> None:
        """Forget the parent's backend, in a forked child."""
        # A thread of the parent may have held the lock at the fork, and that thread does not exist here.
        self._lock = threading.Lock()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.detach_after_fork()


_live: Final[weakref.WeakSet[Sandbox]] = weakref.WeakSet()
_shared: Final[dict[SandboxConfig, Sandbox]] = {}
_shared_lock: Final = threading.Lock()


def shared_sandbox(config: SandboxConfig) -> Sandbox:
    """Return this process's one sandbox for a config; it is closed when the process exits."""
    with _shared_lock:
        if config not in _shared:
            _shared[config] = Sandbox(config)
        return _shared[config]


@atexit.register
def _close_all() -> None:
    for sandbox in list(_live):
        sandbox.close()


def _detach_all_after_fork() -> None:
    for sandbox in list(_live):
        sandbox._detach_after_fork()  # noqa: SLF001 - the same module


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all_after_fork)
