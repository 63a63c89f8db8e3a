"""Starts and stops SGLang's process, without leaving anything behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import psutil
from attrs import define, field

from turnwise.errors import EngineError
from turnwise_sglang_engine.frames import Array, Frame, Link

_STOP_S = 60.0
"""Seconds that SGLang may take to free its devices before it is killed."""
_STOP_POLL_S = 0.02
_ERROR = re.compile(r"^(?:\[[^\]]*\] )?(?:[\w.]*(?:Error|Exception|Interrupt|Died))\b.*")
_LOG_TAIL_BYTES = 64 << 10

COMMAND = (sys.executable, "-m", "turnwise_sglang_engine.server")


def living_members(group: int) -> list[int]:
    """Return the ids of the running processes of a group, without zombies."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@define(eq=False)
class ServerProcess:
    """
    SGLang's process and its children.

    Attributes:
        on_frame: called with each frame that it sends once it is ready.
        on_lost: called when the connection has ended, from either side.
        command: starts the process.
    """

    on_frame: Callable[[Frame], None]
    on_lost: Callable[[], None]
    command: tuple[str, ...] = COMMAND
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _log: IO[bytes] | None = field(default=None, init=False)
    _link: Link | None = field(default=None, init=False)
    _ready: asyncio.Future[Frame] | None = field(default=None, init=False)
    _exited: bool = field(default=False, init=False)
    _cause: str = field(default="it left no error", init=False)

    async def start(self, arguments: dict[str, Any], environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
        """
        Start the process, and return the head of its first frame when it is ready.

        Raises:
            EngineError: it did not start; the text has the cause from the process or from its log.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            self._spawn(theirs, environment)
        link = Link(self._received, self._lost)
        ours.setblocking(False)
        await loop.create_connection(lambda: link, sock=ours)
        self._link = link
        await asyncio.to_thread(self._write_settings, {"parent": os.getpid(), "arguments": arguments})
        try:
            async with asyncio.timeout(timeout_s):
                frame = await self._ready
        except TimeoutError:
            raise EngineError(f"SGLang did not start within {timeout_s} s (start_timeout_s)") from None
        if frame.head["op"] == "failed":
            raise EngineError(frame.head["error"])
        return frame.head

    def send(self, head: dict[str, Any], *arrays: Array) -> None:
        if self._link is not None:
            self._link.send(head, *arrays)

    async def stop(self) -> None:
        """Stop the process and its children. Idempotent, and allowed at any time."""
        self.send({"op": "stop"})
        try:
            async with asyncio.timeout(_STOP_S):
                while self._link is not None and not self._has_ended():  # noqa: ASYNC110 - processes have no event
                    await asyncio.sleep(_STOP_POLL_S)
        except TimeoutError:
            pass
        finally:
            self.kill()
        while self._link is not None:
            self._link.close()
            await asyncio.sleep(0)
        # A killed process keeps its memory and ports until the kernel has removed it.
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                while self._process is not None and living_members(self._process.pid):  # noqa: ASYNC110 - no event either
                    await asyncio.sleep(_STOP_POLL_S)

    def _has_ended(self) -> bool:
        # WNOWAIT does not reap the process, so that its id remains the id of its group.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process is None or self._exited or os.waitid(os.P_PID, self._process.pid, options) is not None

    def kill(self) -> None:
        """Kill the process and its children at once. Needs no event loop, so that a finalizer can call it."""
        if self._process is None or self._exited:
            return
        self._exited = True
        # The process leads a group that contains all its children.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._log is not None:
            self._cause = self.cause()
            self._log.close()
            self._log = None

    def cause(self) -> str:
        """Return the last error in the log, or else its last line."""
        if self._log is None:
            return self._cause
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG_TAIL_BYTES))
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.match(line)]
        return (errors or lines or [self._cause])[-1].strip()

    def _spawn(self, theirs: socket.socket, environment: dict[str, str]) -> None:
        # The file has no name, so nothing stays behind. Its end is shown if SGLang dies.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        self._process = subprocess.Popen(
            [*self.command, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            pass_fds=[theirs.fileno()],
            # A separate group: it is killed as a whole, and Ctrl-C in a terminal reaches only our process.
            start_new_session=True,
        )

    def _write_settings(self, settings: dict[str, Any]) -> None:
        pipe = self._process.stdin if self._process is not None else None
        if pipe is not None:
            # If the process has ended already, the lost connection reports it.
            with suppress(BrokenPipeError), pipe:
                pipe.write(json.dumps(settings).encode())

    def _received(self, frame: Frame) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(frame)
        else:
            self.on_frame(frame)

    def _lost(self) -> None:
        self._link = None
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineError(f"SGLang did not start: {self.cause()}"))
        self.on_lost()
