"""A session with a listener of its own is answered there and nowhere else."""

import asyncio
import socket

import aiohttp
import pytest
from session_scenarios import OneModel

from turnwise_gateway.host import RunningServer
from turnwise_gateway.server import ServerOptions


class Backend:
    """A session that is asked for its models alone: the routes of these tests are answered by the server."""

    others = OneModel()


async def list_models(port, key):
    """Return the status of a request for the models."""
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.get(f"http://127.0.0.1:{port}/v1/models") as response,
    ):
        return response.status


def test_each_key_is_good_at_one_listener():
    """The key of another workspace, which a program has stolen, is refused, and so is every key at a wrong place."""

    async def run():
        server = RunningServer("tiny", ServerOptions())
        await server.start()
        homes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        first, second, outside = Backend(), Backend(), Backend()
        async with server.open_at(homes[0], "a", first) as a, server.open_at(homes[1], "b", second) as b:
            with server.open("c", outside) as c:
                ports = [int(url.split(":")[2].split("/")[0]) for url in (a.openai_base_url, b.openai_base_url)]
                ports.append(int(server.url.rpartition(":")[2]))
                statuses = [
                    [await list_models(port, key) for port in ports] for key in (a.api_key, b.api_key, c.api_key)
                ]
                assert statuses == [[200, 403, 403], [403, 200, 403], [403, 403, 200]]
                assert [await list_models(port, "guessed") for port in ports] == [401, 401, 401]
        with pytest.raises(aiohttp.ClientConnectionError):
            await list_models(ports[0], a.api_key)
        await server.stop()

    asyncio.run(run())
