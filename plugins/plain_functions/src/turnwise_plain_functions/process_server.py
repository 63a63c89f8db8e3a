"""
The other side of `process`: runs calls of functions, one after the other, until its input ends.

Started as ``python -m turnwise_plain_functions.process_server LIFELINE``. Requests and answers are lines of JSON.
LIFELINE is the read end of a pipe that the driver never writes to; it closes when the driver ends.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import inspect
import json
import os
import select
import signal
import sys
from collections.abc import Awaitable
from typing import Any

from attrs import asdict

from turnwise.errors import InfrastructureError, ToolError
from turnwise.types import JsonDict
from turnwise_plain_functions.function_tool import FunctionTool, as_result, tool


def main() -> None:
    """Serve until standard input ends."""
    _die_with_driver(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of functions must not mix with the answers
    for line in sys.stdin.buffer:
        answers.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        answers.flush()


def _die_with_driver(lifeline: int) -> None:
    """
    Let the kernel kill this process and its children when the driver ends.

    No thread or handler could: a call may hold the interpreter for hours, and a process with threads should not fork.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return  # not Linux: the process ends after its call
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:
        sys.exit()  # the driver ended before this


def answer(request: dict[str, Any]) -> JsonDict:
    """Run one call and return its result or its exception as JSON values."""
    try:
        found = getattr(importlib.import_module(request["module"]), request["name"])
        func = found.func if isinstance(found, FunctionTool) else found
        keywords = tool(func).keywords(request["arguments"]) if request["convert"] else request["arguments"]
        value = func(**keywords)
        result = as_result(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
        return asdict(result) | {"metrics": dict(result.metrics)}
    except (ToolError, InfrastructureError) as error:
        kind = ToolError if isinstance(error, ToolError) else InfrastructureError
        return {"raised": kind.__name__, "text": str(error)}
    except BaseException as error:  # noqa: BLE001 - the model reads it; sys.exit ends a call, not the process
        return {"raised": type(error).__name__, "text": str(error)}


async def _awaited(value: Awaitable[object]) -> object:
    return await value


if __name__ == "__main__":
    main()
