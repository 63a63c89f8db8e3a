"""
Processes for functions that may hang: an abandoned call ends with its process, whatever the function does.

A process runs many calls, one after the other. There are at most `MAX_PROCESSES`; further calls wait for one. Only JSON
crosses the process border, in lines. `process_server` is the other side.

Each process leads a session, so Ctrl-C in a terminal does not reach it. It is killed together with the children of its
calls, by the kernel if the driver is killed. Only a child that starts a session itself survives.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Final, cast

from attrs import define, field

from turnwise.errors import ConfigError, InfrastructureError, ToolError
from turnwise.media import find_picture
from turnwise.report import Report
from turnwise.threads import in_thread
from turnwise.types import JsonObject, ToolResult

MAX_PROCESSES: Final = max(4, os.cpu_count() or 1)


def check_importable(func: Callable[..., object], name: str) -> None:
    """Raise `ConfigError` when a process could not find a function by its module and name."""
    module, qualified = str(getattr(func, "__module__", None)), getattr(func, "__qualname__", "")
    # The module of a file that a config names is called by its path, which a process cannot import.
    importable = module not in ("None", "__main__") and all(part.isidentifier() for part in module.split("."))
    if not importable or not qualified.isidentifier():
        raise ConfigError(f"tool {name!r} cannot run in a process: it is no function of a module that can be imported")
    found = getattr(importlib.import_module(module), qualified, func)  # a decorator runs before the module has the name
    if func not in (found, getattr(found, "func", None)):
        raise ConfigError(f"tool {name!r} cannot run in a process: {module}.{qualified} is something else")


class _Process:
    """One process; its standard output carries answers, and prints of functions go to standard error."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        lifeline, self._lifeline = os.pipe()
        # A socket, unlike a pipe, can be shut down while a thread reads it and a forked child holds its other end.
        self._socket, answers = socket.socketpair()
        self._answers = self._socket.makefile("rb")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "turnwise_plain_functions.process_server", str(lifeline)],
                stdin=subprocess.PIPE,
                stdout=answers.fileno(),
                env=environment,
                pass_fds=[lifeline],
                start_new_session=True,
            )
        finally:
            os.close(lifeline)
            answers.close()
        self._requests = cast("IO[bytes]", self._process.stdin)  # Popen was asked for a pipe, so it is not None

    def ask(self, request: str) -> str:
        """Return the answer, empty when the process ended."""
        try:
            self._requests.write(request.encode() + b"\n")
            self._requests.flush()
            return self._answers.readline().decode()
        except (OSError, ValueError):
            return ""

    def end(self) -> int:
        """Kill the process and its children, close its pipes, and return its exit code."""
        self.kill()
        code = self._process.wait()
        os.close(self._lifeline)
        for pipe in (self._requests, self._answers, self._socket):
            with suppress(OSError):
                pipe.close()
        return code

    def kill(self) -> None:
        """Kill the process and its children, and wake the thread that waits for its answer. Call it before `end`."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


@define(eq=False)
class _Call:
    """A running call; it may be abandoned before it has a process."""

    given_up: bool = False
    process: _Process | None = None
    lock: threading.Lock = field(factory=threading.Lock)

    def give_up(self) -> None:
        with self.lock:
            self.given_up = True
            if self.process is not None:
                self.process.kill()


@define(eq=False)
class _Processes:
    """The idle processes, and a semaphore for further ones. Threads call its methods."""

    _slots: threading.Semaphore = field(factory=lambda: threading.Semaphore(MAX_PROCESSES))
    _idle: list[_Process] = field(factory=list)

    def run(self, call: _Call, request: str) -> str:
        """Return the answer to a request, empty when its process ended."""
        with self._slots:
            try:
                process = self._idle.pop()
            except IndexError:
                process = _Process()
            with call.lock:
                call.process = process
                if call.given_up:
                    process.kill()
            answer = process.ask(request)
            with call.lock:
                call.process = None
            if not answer or call.given_up:
                code = process.end()
                return "" if call.given_up else json.dumps({"ended": code})
            self._idle.append(process)
            return answer

    def end(self) -> None:
        """Kill the idle processes."""
        while self._idle:
            self._idle.pop().end()


_PROCESSES: Final = _Processes()
atexit.register(_PROCESSES.end)


async def in_process(func: Callable[..., object], arguments: JsonObject, *, tool: str, convert: bool) -> ToolResult:
    """
    Run one call of an importable function in a process, which a cancellation kills.

    Arguments are JSON values; `convert` gives them the types of the function's annotations. Errors name the `tool`.
    Raises the `ToolError` or `InfrastructureError` that the function raised.
    """
    place = {"module": func.__module__, "name": func.__qualname__}
    request = {**place, "tool": tool, "arguments": dict(arguments), "convert": convert}
    call = _Call()
    try:
        answer = await in_thread(_PROCESSES.run, {"call": call, "request": json.dumps(request)})
    except asyncio.CancelledError:
        call.give_up()
        raise
    return _result(json.loads(answer))


def _result(answer: dict[str, Any]) -> ToolResult:
    if "ended" in answer:
        return ToolResult(text=f"Error: the tool's process ended with code {answer['ended']}", error=True)
    kinds = {"ToolError": ToolError, "InfrastructureError": InfrastructureError}
    if kind := answer.get("raised"):
        if kind in kinds:
            raise kinds[kind](answer["text"])
        return ToolResult(text=f"Error: {kind}: {answer['text']}" if answer["text"] else f"Error: {kind}", error=True)
    pictures = tuple(find_picture(b64decode(data), media_type) for data, media_type in answer.pop("pictures"))
    report = answer.pop("report")
    return ToolResult(**answer, pictures=pictures, report=report and Report(**report))
