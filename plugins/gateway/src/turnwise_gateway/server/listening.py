"""Lets a server listen; a process without free descriptors says so in a line, and accepts again when it has some."""

from __future__ import annotations

import asyncio
import os
import socket

from aiohttp import web

_BACKLOG = 1024


async def listen(runner: web.BaseRunner, host: str, port: int) -> None:
    """Accept connections at an address; `OSError` if it cannot be used."""
    await _start(web.TCPSite(runner, host, port, backlog=1))


async def listen_at(runner: web.BaseRunner, listener: socket.socket) -> None:
    """Accept the connections of a socket."""
    await _start(web.SockSite(runner, listener, backlog=1))


async def _start(site: web.BaseSite) -> None:
    await site.start()
    server = site._server  # noqa: SLF001 - aiohttp has no public name for it
    if not isinstance(server, asyncio.Server):
        return  # of an event loop that makes its own connections
    for listener in server.sockets:
        # asyncio accepts as many connections in a pass as the system queues. Without free descriptors, it logs an error
        # and plans another pass for each of them, so each pass has many more errors than the one before. It accepts one
        # at a time here, while the system queues many.
        with socket.socket(fileno=os.dup(listener.fileno())) as same:
            same.listen(_BACKLOG)
