"""
A network in memory for simulated event loops: bytes come late, and connections break in every way.

`Network.install` gives a loop the methods behind `asyncio.open_connection` and `asyncio.start_server`, so that code
over streams runs unchanged. Bytes of one direction of a connection keep their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from enum import Enum
from types import SimpleNamespace
from typing import Any

from attrs import define, field

Delay = Callable[[], float]


class Loss(Enum):
    """
    A way to lose a connection. A side that does not see the loss notices it when its keepalive fails.

    `RESET`: both sides see it soon. `CLIENT`: only the client does. `SERVER`: only the server does. `SILENT`: neither.
    """

    RESET = "reset"
    CLIENT = "client"
    SERVER = "server"
    SILENT = "silent"


@define(eq=False)
class OrderedPipe:
    """Delivers items after random delays, in the order in which they were sent."""

    delay: Delay
    deliver: Callable[[Any], None]
    _items: deque[Any] = field(factory=deque, init=False)
    _due: float = field(default=0.0, init=False)

    def send(self, item: object) -> None:
        loop = asyncio.get_running_loop()
        self._due = max(self._due, loop.time() + self.delay())
        self._items.append(item)
        loop.call_at(self._due, self._next)

    def clear(self) -> None:
        """Lose everything that has not arrived."""
        self._items.clear()

    def _next(self) -> None:
        # The oldest item, whichever timer fires first: timers of one moment have no order.
        if self._items:
            self.deliver(self._items.popleft())


class _Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: Network, owner: object) -> None:
        super().__init__()
        self.network, self.owner = network, owner
        self.protocol: Any = None
        self.peer: _Transport | None = None
        self.is_cut = False
        self._closing = False
        self._paused = False
        self._waiting: deque[bytes | None] = deque()
        self._pipe = OrderedPipe(network.delay, self._arrive)

    def connect(self, protocol: Any, peer: _Transport) -> None:
        self.protocol, self.peer = protocol, peer
        protocol.connection_made(self)

    # The interface of asyncio

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing and not self.is_cut:
            self._pipe.send(bytes(data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self.is_cut:
                self._pipe.send(None)
            asyncio.get_running_loop().call_soon(self._lose, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        while self._waiting and not self._paused:
            self._read(self._waiting.popleft())

    def is_reading(self) -> bool:
        return not self._paused

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: writes never wait."""

    def get_protocol(self) -> Any:
        return self.protocol

    def set_protocol(self, protocol: object) -> None:
        self.protocol = protocol

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return SimpleNamespace(setsockopt=lambda *_option: None) if name == "socket" else default

    # The faults

    def break_off(self, after_s: float) -> None:
        """Let this side see after a while that the connection is lost."""
        asyncio.get_running_loop().call_later(after_s, self._lose, ConnectionResetError("the connection was reset"))

    def cut(self) -> None:
        """Lose everything that this side sends, and all that has not arrived yet."""
        self.is_cut = True
        self._pipe.clear()

    def _arrive(self, data: bytes | None) -> None:
        peer = self.peer
        if peer is None or peer.protocol is None:
            return
        if peer._paused:  # noqa: SLF001 - the other end of this connection
            peer._waiting.append(data)  # noqa: SLF001
        else:
            peer._read(data)  # noqa: SLF001

    def _read(self, data: bytes | None) -> None:
        if self.protocol is None or self._closing:
            return
        if data is not None:
            self.protocol.data_received(data)
            return
        self.protocol.eof_received()
        self.close()

    def _lose(self, error: Exception | None) -> None:
        self._closing = True
        if self.protocol is not None:
            protocol, self.protocol = self.protocol, None
            protocol.connection_lost(error)
            self.network.forget(self)


@define(eq=False)
class _Server:
    """A listening socket."""

    network: Network
    port: int
    owner: object
    make_protocol: Callable[[], Any]
    context: Context = field(factory=copy_context)

    @property
    def sockets(self) -> list[Any]:
        return [SimpleNamespace(getsockname=lambda: ("127.0.0.1", self.port))]

    def close(self) -> None:
        self.network.servers.pop(self.port, None)

    def is_serving(self) -> bool:
        return self.port in self.network.servers

    async def wait_closed(self) -> None:
        """Return: nothing is left to close."""


@define(eq=False)
class Network:
    """
    Open connections and listening sockets.

    Attributes:
        delay: seconds until some bytes arrive; asked for each write.
        keepalive_s: seconds after which a side notices a loss that it did not see.
        owner: returns the process that opens a connection, so that `lose_all` finds its ends.
        clients: the ends of open connections that have connected to a server.
    """

    delay: Delay = field(default=lambda: 0.0)
    keepalive_s: Delay = field(default=lambda: 25.0)
    owner: Callable[[], object] = field(default=lambda: None)
    servers: dict[int, _Server] = field(factory=dict, init=False)
    clients: list[_Transport] = field(factory=list, init=False)
    _num_ports: int = field(default=0, init=False)

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the streams of a loop use this network."""
        loop.create_connection = self._connect  # type: ignore[method-assign, assignment]
        loop.create_server = self._listen  # type: ignore[method-assign, assignment]

    def lose(self, client: _Transport, loss: Loss, soon: Delay) -> None:
        """Lose the connection of a client; sides that see it do so after `soon`."""
        assert client.peer is not None
        for end, seeing in ((client, (Loss.RESET, Loss.CLIENT)), (client.peer, (Loss.RESET, Loss.SERVER))):
            end.cut()
            end.break_off(soon() if loss in seeing else self.keepalive_s())

    def lose_all(self, owner: object, soon: Delay) -> None:
        """Close all connections and servers of a process that has died, as its system does."""
        for server in [each for each in self.servers.values() if each.owner is owner]:
            server.close()
        for client in list(self.clients):
            ends = (client, client.peer)
            for end, other in (ends, ends[::-1]):
                if end is not None and other is not None and end.owner is owner:
                    end.cut()
                    other.cut()
                    other.break_off(soon())

    def forget(self, end: _Transport) -> None:
        if end in self.clients:
            self.clients.remove(end)

    async def _connect(self, make_protocol: Callable[[], Any], _host: str, port: int, **_options: object) -> Any:
        await asyncio.sleep(self.delay())
        if (server := self.servers.get(port)) is None:
            raise ConnectionRefusedError("no process listens")
        client, accepted = _Transport(self, self.owner()), _Transport(self, server.owner)
        protocol = make_protocol()
        # In the context of the server, because the tasks that serve the connection belong to it.
        server.context.copy().run(lambda: accepted.connect(server.make_protocol(), client))
        client.connect(protocol, accepted)
        self.clients.append(client)
        return client, protocol

    async def _listen(self, make_protocol: Callable[[], Any], *_address: object, **_options: object) -> _Server:
        self._num_ports += 1
        server = self.servers[self._num_ports] = _Server(self, self._num_ports, self.owner(), make_protocol)
        return server
