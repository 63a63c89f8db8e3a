"""Runs blocking functions in threads and delays cancellations until they have returned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


async def call_in_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """
    Call a function in a thread, as `asyncio.to_thread` does, but return only after the function has.

    A cancelled `asyncio.to_thread` leaves its thread running. Its caller would free the memory or the files that the
    thread still writes, and anything written later would leak. So a cancellation is raised after the thread has ended,
    as `trio.to_thread.run_sync` does by default.
    """
    future = asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs))
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        future.exception()  # asyncio logs an exception that is never retrieved
        raise asyncio.CancelledError
    return future.result()
