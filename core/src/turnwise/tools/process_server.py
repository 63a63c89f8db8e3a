"""
The process side of `turnwise.tools.process`: runs calls of functions, one after the other, until its input ends.

Started as ``python -m turnwise.tools.process_server``. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
from typing import Any

from attrs import asdict

from turnwise.errors import InfrastructureError, ToolError
from turnwise.tools.function import as_result, function_tool


def main() -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints of functions must not mix with the answers
    for line in sys.stdin.buffer:
        answers.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        answers.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run one call and return its result or its exception as JSON values."""
    try:
        func = getattr(importlib.import_module(request["module"]), request["name"])
        keywords = function_tool(func).keywords(request["arguments"]) if request["convert"] else request["arguments"]
        value = func(**keywords)
        result = as_result(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
        return asdict(result) | {"metrics": dict(result.metrics)}
    except (ToolError, InfrastructureError) as error:
        kind = ToolError if isinstance(error, ToolError) else InfrastructureError
        return {"raised": kind.__name__, "text": str(error)}
    except BaseException as error:  # noqa: BLE001 - the model reads it; sys.exit ends a call, not the process
        return {"raised": type(error).__name__, "text": str(error)}


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    main()
