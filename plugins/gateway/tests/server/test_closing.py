"""The end of a server leaves no client waiting, whenever the client connected."""

import asyncio
import gc
import socket

import pytest
from aiohttp import web

from turnwise_gateway.server.closing import close_runner

GUARD_S = 60


@pytest.mark.many_cases(2)
@pytest.mark.parametrize("passes", range(6))
def test_a_connection_that_comes_at_the_end_is_closed(passes):
    """The client gets an end or a reset, and no transport is left open, however far its acceptance had come."""

    async def connect_and_close() -> bytes:
        runner = web.AppRunner(web.Application(), shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        with socket.create_connection(runner.addresses[0], timeout=GUARD_S) as client:
            for _ in range(passes):
                await asyncio.sleep(0)
            await close_runner(runner)
            try:
                return await asyncio.to_thread(client.recv, 1)
            except ConnectionResetError:
                return b""

    assert asyncio.run(connect_and_close()) == b""
    gc.collect()  # an open transport warns when it is freed, and pytest makes an error of it
