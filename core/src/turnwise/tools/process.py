"""
Processes for functions that may hang: a call that is given up ends with its process, whatever the function does.

A process runs one call at a time and serves many, one after the other. There are at most `MAX_PROCESSES`; further calls
wait for one. Only JSON travels, as lines (see `turnwise.tool_server` for the other end).
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, Final, cast

from attrs import define, field

from turnwise.errors import ConfigError, InfrastructureError, ToolError
from turnwise.tool_thread import in_thread
from turnwise.types import ToolResult

MAX_PROCESSES: Final = max(4, os.cpu_count() or 1)


def refuse_unimportable(func: Callable[..., Any], name: str) -> None:
    """Raise `ConfigError` when a process could not find a function by its module and name."""
    module, qualified = getattr(func, "__module__", None), getattr(func, "__qualname__", "")
    if module is None or module == "__main__" or not qualified.isidentifier():
        raise ConfigError(f"tool {name!r} cannot run in a process: it is no function of a module that can be imported")
    if getattr(importlib.import_module(module), qualified, None) is not func:
        raise ConfigError(f"tool {name!r} cannot run in a process: {module}.{qualified} is something else")


class _Process:
    """One process; its standard output carries answers, and what functions print goes to standard error."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "turnwise.tool_server"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        # Pipes were asked for, so they are there.
        self._requests = cast("IO[bytes]", self._process.stdin)
        self._answers = cast("IO[bytes]", self._process.stdout)

    def ask(self, request: str) -> str:
        """Return the answer, empty when the process ended."""
        try:
            self._requests.write(request.encode() + b"\n")
            self._requests.flush()
            return self._answers.readline().decode()
        except (OSError, ValueError):
            return ""

    def end(self) -> int:
        """Kill it, free what it held, and return how it ended."""
        self._process.kill()
        code = self._process.wait()
        for pipe in (self._requests, self._answers):
            with suppress(OSError):
                pipe.close()
        return code

    def kill(self) -> None:
        """Let a thread that waits for its answer go on."""
        self._process.kill()


@define(eq=False)
class _Call:
    """A call on its way: it may be given up before it has a process."""

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
    """Those that wait for a call, and how many more there may be. Its methods are called in threads."""

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
        """End those that are idle."""
        while self._idle:
            self._idle.pop().end()


_PROCESSES: Final = _Processes()
atexit.register(_PROCESSES.end)


async def in_process(func: Callable[..., Any], arguments: Mapping[str, Any], *, convert: bool) -> ToolResult:
    """
    Run one call of a function in a process; cancelling it kills the process.

    Args:
        func: importable.
        arguments: JSON values.
        convert: whether the values are to become what the function's annotations promise.

    Raises:
        ToolError, InfrastructureError: the function did.
    """
    request = {"module": func.__module__, "name": func.__qualname__, "arguments": dict(arguments), "convert": convert}
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
    return ToolResult(**answer)
