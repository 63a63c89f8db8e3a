"""The end of a server: it listens no more, and then closes all connections."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

_ACCEPT_PASSES: Final = 8
"""Passes of the event loop after the last accepted connection."""


async def close_runner(runner: web.BaseRunner) -> None:
    """Stop to listen, and then close all connections."""
    for site in runner.sites:
        await site.stop()
    # A connection that was just accepted gets its handler some passes later. Without one nobody would close it, and a
    # handler that has not run yet would drop the request and keep its client waiting.
    for _ in range(_ACCEPT_PASSES):
        await asyncio.sleep(0)
    await runner.cleanup()
