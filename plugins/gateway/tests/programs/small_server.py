"""Serves a gateway in a process with few descriptors, and prints its port; ends when its input does."""

import asyncio
import resource
import sys

from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory


async def main() -> None:
    most = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with GatewayServer(SessionDirectory("m"), ServerOptions(max_waiting=10**6)) as server:
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main())
