"""
A network in memory, for servers and clients on one simulated event loop: TCP as aiohttp's server sees it.

Bytes and the ends of connections arrive late, the system may take a response in two parts, and a client that closes its
end with unread bytes, or gets bytes afterwards, resets the connection.
"""

import asyncio
import json
import random
import socket
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from attrs import define, field, frozen

from turnwise_testing.simulation.network import OrderedPipe

SLOW = (0.0, 0.0, 0.01, 1.0)
"""Longest delays in seconds; each connection has one of them."""


@frozen
class Response:
    """A whole response of HTTP."""

    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body) if self.body else {}

    def reply(self) -> dict[str, Any]:
        """Return the id, the text and the tool calls of a chat completion, which may have been a stream."""
        if not self.body.startswith(b"data:") and not self.body.startswith(b":"):
            body = self.json()
            message = body["choices"][0]["message"]
            return {"id": body["id"], "content": message.get("content") or "", "calls": message.get("tool_calls") or []}
        found: dict[str, Any] = {"id": "", "content": "", "calls": []}
        for line in self.body.decode().splitlines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                found["id"] = event["id"]
                for choice in event["choices"]:
                    found["content"] += choice["delta"].get("content") or ""
                    for call in choice["delta"].get("tool_calls") or []:
                        if "id" in call:
                            found["calls"].append(call)
                        else:
                            found["calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        return found


def split_response(data: bytes) -> tuple[Response, bytes] | None:
    """Return the first response of some bytes, and the bytes after it; None while it is not whole."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return None
    lines = head.decode().lower().split("\r\n")
    if not lines[0].startswith("http/1.1 "):
        raise ValueError(f"no response of HTTP: {data!r}")
    status = int(lines[0].split()[1])
    fields = dict(line.split(": ", 1) for line in lines[1:])
    if fields.get("transfer-encoding") == "chunked":
        body = b""
        while True:
            size_line, found, rest = rest.partition(b"\r\n")
            if not found or len(rest) < int(size_line, 16) + 2:
                return None
            size = int(size_line, 16)
            body, rest = body + rest[:size], rest[size + 2 :]
            if size == 0:
                return Response(status, body), rest
    size = int(fields.get("content-length", 0))
    return None if len(rest) < size else (Response(status, rest[:size]), rest[size:])


@frozen
class FakeSocket:
    """Names a port."""

    port: int
    family: int = socket.AF_INET

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)


@define(eq=False)
class Network:
    """
    Listening servers by their port.

    Attributes:
        faults: draws delays; None for a network without them.
        handed: text of each reply of the model that the system took whole, by its id.
    """

    faults: random.Random | None
    handed: dict[str, str] = field(factory=dict)
    _factories: dict[int, Callable[[], asyncio.Protocol]] = field(factory=dict)
    _num_ports: int = 40_000

    def install(self) -> None:
        """Let the running loop make its servers here."""
        asyncio.get_running_loop().create_server = self._create_server  # type: ignore[method-assign, assignment]

    def new_port(self) -> int:
        self._num_ports += 1
        return self._num_ports

    async def _create_server(self, factory: Any, _host: object = None, port: int = 0, *, sock: Any = None, **_: Any):
        number = sock.getsockname()[1] if sock else port or self.new_port()
        self._factories[number] = factory
        return Listener(self, number)

    def forget(self, port: int) -> None:
        self._factories.pop(port, None)

    def connect(self, url: str) -> "Client":
        """Return a connection; `ConnectionRefusedError` without a listener."""
        port = urlsplit(url).port or 0
        if port not in self._factories:
            raise ConnectionRefusedError(url)
        slow_s = self.faults.choice(SLOW) if self.faults else 0.0
        return Client(self, self._factories[port](), slow_s)

    def draws(self, probability: float) -> bool:
        return self.faults is not None and self.faults.random() < probability

    def delay(self, longest_s: float) -> float:
        return self.faults.random() * longest_s if self.faults is not None else 0.0


@define(eq=False)
class Listener(asyncio.AbstractServer):
    """A server that listens at a port of the network."""

    network: Network
    port: int

    @property
    def sockets(self) -> tuple[FakeSocket, ...]:
        return (FakeSocket(self.port),)

    def close(self) -> None:
        self.network.forget(self.port)

    async def wait_closed(self) -> None: ...


def _make_wire(network: Network, slow_s: float) -> OrderedPipe:
    """Return one direction of a connection, which carries calls of the other end."""
    return OrderedPipe(partial(network.delay, slow_s), lambda call: call())


class ServerEnd(asyncio.Transport):
    """The transport of the server's protocol."""

    def __init__(self, client: "Client", protocol: Any, slow_s: float) -> None:
        super().__init__()
        self._client, self._protocol, self._network = client, protocol, client.network
        self._wire = _make_wire(self._network, slow_s)
        self._slow_s = slow_s
        self._high, self._buffer, self._taken = 65_536, b"", b""
        self._is_closing = self._is_lost = self._is_paused = False
        protocol.connection_made(self)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 65_536 if high is None else high

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write(self, data: Any) -> None:
        if self._is_lost or not data:
            return
        is_idle = not self._buffer
        self._buffer += bytes(data)
        if is_idle and not self._network.draws(0.4):
            self._take()
            return
        if is_idle:  # the system takes the rest when it has room
            asyncio.get_running_loop().call_later(self._network.delay(self._slow_s), self._take)
        if len(self._buffer) > self._high and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def _take(self) -> None:
        if self._is_lost:
            return
        data, self._buffer = self._buffer, b""
        self._wire.send(partial(self._client.receive, data))
        self._note(data)
        if self._is_paused:
            self._is_paused = False
            self._protocol.resume_writing()
        if self._is_closing:
            self._lose(None)

    def _note(self, data: bytes) -> None:
        self._taken += data
        while (found := split_response(self._taken)) is not None:
            response, self._taken = found
            if response.status == 200 and b"chatcmpl-" in response.body:
                reply = response.reply()
                self._network.handed[reply["id"]] = reply["content"]

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._buffer:
                asyncio.get_running_loop().call_soon(self._lose, None)

    def abort(self) -> None:
        self.reset(None)

    def receive(self, data: bytes) -> None:
        """Hand bytes of the client to the server."""
        if not self._is_closing:
            self._protocol.data_received(data)

    def end(self) -> None:
        """Say that the client has closed its end in order."""
        if not self._is_closing and not self._protocol.eof_received():
            self.close()

    def reset(self, error: Exception | None) -> None:
        """Break the connection."""
        if not self._is_lost:
            self._is_closing, self._buffer = True, b""
            asyncio.get_running_loop().call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._wire.send(self._client.lose)
            self._protocol.connection_lost(error)


class Client:
    """The client's end of a connection."""

    def __init__(self, network: Network, protocol: Any, slow_s: float) -> None:
        self.network = network
        self._wire = _make_wire(network, slow_s)
        self._data, self._is_closed, self._is_lost = b"", False, False
        self._changed = asyncio.Event()
        self._server = ServerEnd(self, protocol, slow_s)

    @property
    def is_open(self) -> bool:
        return not self._is_closed and not self._is_lost

    async def ask(self, url: str, method: str, headers: dict[str, str], body: bytes = b"") -> Response:
        """Send a request and return the response; `ConnectionError` if the connection ends before."""
        parts = urlsplit(url)
        fields = {"Host": parts.netloc, "Content-Length": str(len(body)), **headers}
        lines = [f"{method} {parts.path or '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        self._wire.send(partial(self._server.receive, "\r\n".join([*lines, "", ""]).encode() + body))
        while (found := split_response(self._data)) is None:
            if not self.is_open:
                raise ConnectionResetError(url)
            self._changed.clear()
            await self._changed.wait()
        response, self._data = found
        return response

    def receive(self, data: bytes) -> None:
        """Take bytes of the server; a closed end answers them with a reset."""
        if self._is_closed:
            self._wire.send(partial(self._server.reset, ConnectionResetError("reset by the client")))
        else:
            self._data += data
            self._changed.set()

    def lose(self) -> None:
        """Note that the server has closed the connection."""
        self._is_lost = True
        self._changed.set()

    def close(self) -> None:
        """Close this end; with unread bytes, the system resets the connection."""
        if not self._is_closed:
            self._is_closed = True
            if self._data:
                self._wire.send(partial(self._server.reset, ConnectionResetError("reset by the client")))
            else:
                self._wire.send(self._server.end)
