"""Connections that send nothing, or a part of a request: on every port they end, and other clients go on."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from attrs import frozen
from session_scenarios import OneModel

from turnwise.descriptors import MOST, raise_descriptor_limit
from turnwise_gateway.calls import CallRefusedError, ModelCall
from turnwise_gateway.control.control_server import ControlServer, build_app, json_reply, read_body
from turnwise_gateway.limits import CallLimits
from turnwise_gateway.server import GatewayServer, ServerOptions, SessionDirectory

SECRET = "a secret of the control port"
PROGRAM = Path(__file__).parents[1] / "programs" / "small_server.py"


@frozen
class Port:
    """A port, a request that it answers with 200, and one whose body it waits for."""

    number: int
    key: str
    path: str
    post: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.number)

    def head(self, method: str = "GET", path: str | None = None, more: str = "") -> bytes:
        first = f"{method} {path or self.path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key}\r\n"
        return f"{first}{more}\r\n".encode()

    async def get(self) -> int:
        headers, url = {"Authorization": f"Bearer {self.key}"}, f"http://127.0.0.1:{self.number}{self.path}"
        async with ClientSession(headers=headers) as client, client.get(url) as response:
            return response.status


@asynccontextmanager
async def agents_port(options: ServerOptions) -> AsyncIterator[Port]:
    directory = SessionDirectory("m")
    key = directory.add("s-1", Limited())
    async with GatewayServer(directory, options) as server:
        yield Port(server.port, key, "/v1/models", "/v1/chat/completions")


class Limited:
    """A backend that no call reaches."""

    others = OneModel()

    def __init__(self) -> None:
        self.limits = CallLimits.of_context(1000)

    def note_refusal(self, _call: ModelCall, _refusal: CallRefusedError) -> None:
        """Do nothing."""


@asynccontextmanager
async def control_port(options: ServerOptions) -> AsyncIterator[Port]:
    async def answer(_request: web.Request) -> web.Response:
        return json_reply(200, {})

    async def read(request: web.Request) -> web.Response:
        return json_reply(200, await read_body(request, set()))

    app = build_app([web.get("/tasks", answer), web.post("/tasks/lease", read)], SECRET, options)
    async with ControlServer(app, options) as server:
        yield Port(int(server.url.rsplit(":", 1)[1]), SECRET, "/tasks", "/tasks/lease")


PORTS = {"agents": agents_port, "control": control_port}


def run(name: str, scenario: Callable[[Port], Awaitable[None]], **options: float) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), PORTS[name](ServerOptions(**options)) as port:  # type: ignore[arg-type]
            await scenario(port)

    asyncio.run(main())


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])


@pytest.mark.parametrize("name", PORTS)
@pytest.mark.parametrize("sent", [b"", b"GET", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_an_unfinished_head_is_closed(name: str, sent: bytes) -> None:
    """A client without a whole head loses its connection after `receive_s`, on each port."""

    async def scenario(port: Port) -> None:
        reader, writer = await port.connect()
        writer.write(sent)
        while await reader.read(4096):
            """Wait for the end."""
        await close(writer)

    run(name, scenario, receive_s=0.2)


@pytest.mark.parametrize("name", PORTS)
def test_an_unfinished_body_is_refused(name: str) -> None:
    """A client with a right key and half a body gets 408 after `receive_s`, on each port."""

    async def scenario(port: Port) -> None:
        reader, writer = await port.connect()
        writer.write(port.head("POST", port.post, "Content-Length: 100\r\n") + b"{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        await close(writer)

    run(name, scenario, receive_s=0.2)


@pytest.mark.parametrize("name", PORTS)
@pytest.mark.parametrize(("old", "new"), [(b"\r\n", b"\n"), (b"Host:", b"Ho st:"), (b"HTTP/1.1", b"HTTP/9.9.9")])
def test_a_malformed_head_shows_no_key(name: str, old: bytes, new: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The log of a head that cannot be read does not quote the key in it, on each port."""
    found: list[bytes] = []

    async def scenario(port: Port) -> None:
        reader, writer = await port.connect()
        writer.write(port.head().replace(old, new))
        found.extend([port.key.encode(), await reader.read()])
        await close(writer)

    run(name, scenario, receive_s=100)
    key, answer = found

    assert b" 400 " in answer.partition(b"\r\n")[0]
    assert key.decode() not in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("name", PORTS)
def test_idle_connections_are_bounded(name: str) -> None:
    """Above the bound the oldest idle connection is closed, so a client that sends its request is always served."""

    async def scenario(port: Port) -> None:
        async with AsyncExitStack() as stack:
            idle = []
            for _ in range(20):
                reader, writer = await port.connect()
                stack.push_async_callback(close, writer)
                idle.append(reader)
            assert await port.get() == 200
            for reader in idle[:12]:
                assert await reader.read() == b""  # closed

    run(name, scenario, max_waiting=8, receive_s=100)


@pytest.mark.parametrize("name", PORTS)
def test_a_client_with_a_key_outlasts_strangers(name: str) -> None:
    """A kept connection whose client had a right key is closed after those without one."""

    async def scenario(port: Port) -> None:
        async with AsyncExitStack() as stack:
            reader, writer = await port.connect()
            stack.push_async_callback(close, writer)
            for number in range(2):
                writer.write(port.head())
                assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
                answer = await reader.readuntil(b"\r\n\r\n")
                size = int(answer.lower().partition(b"content-length:")[2].split()[0])
                await reader.readexactly(size)
                for _ in range(20 if number == 0 else 0):
                    _reader, stranger = await port.connect()
                    stack.push_async_callback(close, stranger)

    run(name, scenario, max_waiting=8, receive_s=100)


@pytest.mark.parametrize("name", PORTS)
def test_a_waiting_connection_is_forgotten_at_its_end(name: str) -> None:
    """Connections that have ended do not count: the bound is not used up by earlier clients."""

    async def scenario(port: Port) -> None:
        reader, writer = await port.connect()
        writer.write(port.head()[:20])
        for _ in range(20):
            assert await port.get() == 200
        writer.write(port.head()[20:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        await close(writer)

    run(name, scenario, max_waiting=8, receive_s=100)


def test_without_descriptors_there_is_one_line() -> None:
    """A process whose descriptors are all in use says so once; when some are free, it accepts the next client."""
    command = [sys.executable, str(PROGRAM), "60"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(100)]
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        for each in idle:
            each.close()
        with closing(socket.create_connection(("127.0.0.1", port), timeout=60)) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(15) == b"HTTP/1.1 200 OK"
        process.stdin.close()
        more = process.stderr.read().decode()

    assert line.startswith("all 60 descriptors of this process are in use")
    assert more == ""


def test_the_limit_of_descriptors_is_raised() -> None:
    """A process with a low soft limit gets the hard one, up to a bound, when a port opens."""
    script = (
        "import resource, asyncio\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "from turnwise_gateway.server import GatewayServer, SessionDirectory\n"
        "async def main():\n"
        "    async with GatewayServer(SessionDirectory('m')):\n"
        "        print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    soft, hard = map(int, done.stdout.split())

    assert soft == (MOST if hard < 0 else min(hard, MOST))
    assert raise_descriptor_limit() <= MOST
