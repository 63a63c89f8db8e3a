"""
The other side of `process`: runs calls of functions, one after the other, until its input ends.

Started as ``python -m turnwise_plain_functions.process_server LIFELINE``. Requests and answers are lines of JSON.
LIFELINE is the read end of a pipe that the driver never writes to; it closes when the driver ends.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import select
import signal
import sys
from base64 import b64encode
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve

from turnwise.errors import InfrastructureError, ToolError
from turnwise.types import JsonDict
from turnwise_plain_functions.function_tool import FunctionTool
from turnwise_plain_functions.results import Yielded, as_result, finish

if TYPE_CHECKING:
    from turnwise_plain_functions.arguments import Arguments


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
        func = _function(request["module"], request["name"])
        keywords = request["arguments"]
        if request["convert"]:
            keywords = _arguments(func, request.get("tool", "")).convert(keywords)
        result = as_result(finish(func(**keywords), Yielded()))
        pictures = [(b64encode(each.data).decode("ascii"), each.media_type) for each in result.pictures]
        return asdict(evolve(result, pictures=())) | {"metrics": dict(result.metrics), "pictures": pictures}
    except (ToolError, InfrastructureError) as error:
        kind = ToolError if isinstance(error, ToolError) else InfrastructureError
        return {"raised": kind.__name__, "text": str(error)}
    except BaseException as error:  # noqa: BLE001 - the model reads it; sys.exit ends a call, not the process
        return {"raised": type(error).__name__, "text": str(error)}


def _function(module: str, name: str) -> Callable[..., object]:
    found = getattr(importlib.import_module(module), name)
    return found.func if isinstance(found, FunctionTool) else found


@lru_cache
def _arguments(func: Callable[..., object], name: str) -> Arguments:
    from turnwise_plain_functions.annotations import function_schema  # a function with a schema needs no pydantic

    return function_schema(func, name)[1]


if __name__ == "__main__":
    main()
