"""The end of a server: it accepts no more connections, and then closes all of them."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

_ACCEPT_PASSES: Final = 8
"""Passes of the event loop from an accepted connection to its handler; asyncio needs three."""


async def close_runner(runner: web.BaseRunner) -> None:
    """Accept no more connections, wait until each accepted one has its handler, and close all."""
    loop = asyncio.get_running_loop()
    for site in runner.sites:
        # A connection that was just accepted gets its handler some passes later. asyncio drops it without closing it
        # if its server is closed between, so its client would wait forever. So the server stops to accept first.
        server = site._server  # noqa: SLF001 - aiohttp has no public name for it
        if isinstance(server, asyncio.Server):
            for listener in server.sockets:
                loop.remove_reader(listener.fileno())
    for _ in range(_ACCEPT_PASSES):
        await asyncio.sleep(0)
    await runner.cleanup()
