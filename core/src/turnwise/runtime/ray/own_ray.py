"""
The Ray that a run starts by itself: its processes, its files and its end, which has a deadline.

Ray waits for stopped or dead parts of it without a limit, and after a minute its C++ code ends the driver.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import structlog
from attrs import define, field

from turnwise.interrupts import ENDS_WITHOUT_HANDLERS

END_S: Final = 10.0
"""Seconds for Ray to end, and once more after its processes were ended."""

_NEEDED: Final = ("gcs_server", "raylet")

_MARK: Final = "TURNWISE_RAY"
"""Variable in the environment of all processes that one Ray has started, whoever their parent is."""

_START_TRIES, _START_S = 20, 0.001
"""Looks at the environment of a process that starts, and seconds between them."""

_TOKEN_LOGGER: Final = "ray._private.authentication.authentication_token_setup"


@define(eq=False)
class OwnRay:
    """
    The Ray that this process has started.

    Attributes:
        session: folder of its logs and sockets.
    """

    session: Path | None = None
    _mark: str = field(factory=lambda: uuid4().hex, init=False)
    _parts: list[tuple[str, subprocess.Popen[bytes]]] = field(factory=list, init=False)

    def start(self, **options: Any) -> None:
        """Start Ray and connect to it; options and errors as of `ray.init`."""
        import ray

        # Otherwise one of Ray's processes outlives a killed driver by a minute.
        os.environ.setdefault("RAY_RUNTIME_ENV_AGENT_CHECK_PARENT_INTERVAL_S", "1")
        os.environ[_MARK] = self._mark
        try:
            with _without_usual_warnings():
                ray.init(**options)
        finally:
            os.environ.pop(_MARK, None)
        # Ray has no public way to either.
        node = getattr(ray._private.worker, "_global_node", None)  # noqa: SLF001 - see above
        if node is not None:
            self.session = Path(node.get_session_dir_path())
            self._parts = [(str(name), each.process) for name, parts in node.all_processes.items() for each in parts]

    def is_whole(self) -> bool:
        """Return whether all parts of this Ray still run."""
        return all(part.poll() is None for _name, part in self._parts)

    def dead_part(self) -> str | None:
        """Return the name of a part that has ended and without which no actor can run; None if there is none."""
        return next((name for name, part in self._parts if name in _NEEDED and part.poll() is not None), None)

    def kill(self) -> list[int]:
        """Kill the processes of this Ray that still run, and return their ids."""
        killed = []
        for process in self._processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                killed.append(process)
        return killed

    def remove_files(self) -> None:
        """Remove the folder of the session, and the link to it."""
        if self.session is None:
            return
        latest = self.session.parent / "session_latest"
        with suppress(OSError):
            if latest.resolve() == self.session.resolve():
                latest.unlink()
        shutil.rmtree(self.session, ignore_errors=True)

    def _processes(self) -> Iterator[int]:
        mark = f"{_MARK}={self._mark}".encode()
        for process in Path("/proc").glob("[0-9]*"):  # other systems have no such folder: there, Ray ends alone
            with suppress(OSError):  # it has ended, or is another user's
                if mark in _environment_of(process).split(b"\0"):
                    yield int(process.name)


def _environment_of(process: Path) -> bytes:
    """
    Return the environment of a process, from its folder in /proc.

    It is empty for a moment while the process starts, also after the call that started it has returned.
    """
    for _ in range(_START_TRIES):
        if found := (process / "environ").read_bytes():
            return found
        os.readlink(process / "exe")  # fails for a process that has ended, and for one of the kernel
        time.sleep(_START_S)
    return b""


@contextmanager
def _without_usual_warnings() -> Iterator[None]:
    """Drop two warnings of every start, which ask for nothing: signals are handled here, and so are tokens."""
    usual = ("SIGTERM handler is not set because", "Token authentication is enabled for this Ray cluster")

    def is_unusual(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(usual)

    loggers = [logging.getLogger(name) for name in ("ray._private.worker", _TOKEN_LOGGER)]
    for logger in loggers:
        logger.addFilter(is_unusual)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_unusual)


def call_within(seconds: float, function: Callable[[], None]) -> None:
    """Call a function that uses Ray; log a warning, and let it run on, if it takes longer."""
    if not _call_in_thread(function).wait(seconds):
        structlog.get_logger().warning("Ray does not answer at the end of the run", seconds=seconds)


def _call_in_thread(function: Callable[[], None]) -> threading.Event:
    """Call a function in a daemon thread; return the event of its end."""
    ended = threading.Event()

    def call() -> None:
        with suppress(Exception):  # parts of Ray are gone; the run is over
            function()
        ended.set()

    threading.Thread(target=call, name="turnwise end of ray", daemon=True).start()
    return ended


def end_ray(own: OwnRay | None, *, keep_files: bool = False, seconds: float = END_S) -> None:
    """
    Disconnect from Ray, and end the Ray that this process has started; return within twice the deadline.

    Args:
        own: the Ray that this process has started; None for a cluster of others, whose processes stay.
        keep_files: keep the logs of this Ray.
        seconds: the deadline.
    """
    import ray

    # It would wait without a limit at the end of the process, for what this function has waited for already.
    atexit.unregister(ray.shutdown)
    is_whole = own is None or own.is_whole()
    # If a second interrupt ends the process meanwhile, Ray's C++ code would crash in the exit handlers. If Ray does not
    # end, threads of this code wait on, and would end the process with an exit code of their own.
    had_handlers = not ENDS_WITHOUT_HANDLERS.is_set()
    ENDS_WITHOUT_HANDLERS.set()
    ended = _call_in_thread(ray.shutdown)
    in_time = ended.wait(seconds)
    if is_whole and in_time and had_handlers:
        ENDS_WITHOUT_HANDLERS.clear()
    killed = own.kill() if own is not None else []  # after an orderly end, agents of Ray are left for some seconds
    if not in_time:
        structlog.get_logger().warning("Ray did not end in time", seconds=seconds, killed_processes=killed)
        ended.wait(seconds)
    if ended.is_set():
        atexit.register(ray.shutdown, _exiting_interpreter=True)  # as Ray does at its import
    if own is not None and not keep_files and in_time:
        own.remove_files()
    elif own is not None and own.session is not None:
        structlog.get_logger().info("the logs of Ray are kept", folder=str(own.session))
