"""
Channels between workers and replicas: pickled messages over TCP.

Ray starts these processes and notices their deaths. Only the messages of turns do not use its actor calls: a call
costs sender and receiver much more CPU than a write to a socket, and the head node works for every pair of actors
that know each other.

Both sides prove that they know the key of the server before either unpickles anything. With `RAY_USE_TLS=1`, channels
are encrypted, and use the certificates that Ray's own connections use.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import os
import pickle
import secrets
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import Any, Final

import structlog
from attrs import define, field, frozen

from turnwise.errors import describe

Send = Callable[[Any], None]
Receive = Callable[[Any], None]

_LENGTH: Final = Struct("<Q")
_NUM_BYTES: Final = 32
"""Length of keys, nonces and proofs."""

_READ_AHEAD: Final = 2**22
"""Bytes that may wait for a reader."""

_BACKLOG: Final = 4096
"""Clients that may connect at the same moment, such as all workers at the start of a run."""

_MAX_BYTES: Final = 2**30
"""Most bytes of a message. A peer that announces more is broken, and would fill the memory of this process."""

_HANDSHAKE_S: Final = 10.0
_CLOSE_S: Final = 2.0
_KEEPALIVE: Final = (
    ("TCP_KEEPIDLE", 10),
    ("TCP_KEEPINTVL", 5),
    ("TCP_KEEPCNT", 3),
    ("TCP_USER_TIMEOUT", 25_000),  # milliseconds; the system sends no probes while data waits for an acknowledgement
)
"""A peer whose machine has vanished is found after 25 seconds. The death of a process closes its sockets at once."""


class BrokenChannelError(Exception):
    """A message that one end could not send, read or handle. Later messages would be lost, so the channel ends."""


@frozen
class _Broken:
    """The last message of an end that could not read or handle a message; it has the reason."""

    reason: str


@frozen
class ChannelAddress:
    """The address of a server, and the key that its clients must know."""

    host: str
    port: int
    key: bytes = field(repr=False)


@define(eq=False)
class Channel:
    """One end of an open channel."""

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _failure: str = ""

    def send(self, message: object) -> None:
        """Send a message. It is dropped if the channel is closed; a message that cannot be sent closes it."""
        if self._writer.is_closing():
            return
        try:
            pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            _check_length(len(pickled))
        except Exception as error:  # noqa: BLE001 - any object may fail to pickle, and the receiver waits for it
            self._failure = f"a message cannot be sent: {describe(error)}"
            self._writer.close()
        else:
            self._writer.write(_LENGTH.pack(len(pickled)) + pickled)

    async def receive(self) -> Any:
        """
        Return the next message.

        Raises:
            OSError, EOFError: the channel has ended.
            BrokenChannelError: the message cannot be read, or an earlier one failed at this end or at the peer.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            _check_length(length)
            message = _unpickle(await self._reader.readexactly(length))
        except (OSError, EOFError):
            if self._failure:
                raise BrokenChannelError(self._failure) from None
            raise
        except BrokenChannelError as error:
            self.send(_Broken(str(error)))
            raise
        if isinstance(message, _Broken):
            raise BrokenChannelError(f"the peer says: {message.reason}")
        return message

    async def receive_all(self, handle: Receive) -> None:
        """
        Handle messages until the peer closes the channel or dies.

        Raises:
            BrokenChannelError: a message cannot be read or handled. The peer is told, and should open a new channel.
        """
        while True:
            try:
                message = await self.receive()
            except (OSError, EOFError):
                return
            try:
                handle(message)
            except Exception as error:
                # The sender would wait; over a new channel, it sends its requests again.
                structlog.get_logger().exception("message not handled")
                self.send(_Broken(reason := f"a message cannot be handled: {describe(error)}"))
                raise BrokenChannelError(reason) from error

    async def close(self) -> None:
        """Close the channel. A peer that still reads receives all earlier messages."""
        self._writer.close()
        with suppress(OSError):  # it was lost before, or the peer does not read
            async with asyncio.timeout(_CLOSE_S):
                await self._writer.wait_closed()
        self._writer.transport.abort()

    async def _read_proof(self) -> bytes:
        return await self._reader.readexactly(_NUM_BYTES)

    def _keep_alive(self) -> None:
        connection: socket.socket = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):  # not all systems have all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    async def prove_as_client(self, key: bytes) -> None:
        """Prove that this client knows the key, and check the server; `OSError` or `EOFError` if it does not."""
        self._keep_alive()
        nonce = secrets.token_bytes(_NUM_BYTES)
        self._writer.write(nonce)
        other = await self._read_proof()
        _check(await self._read_proof(), key, b"server", nonce + other)
        self._writer.write(_proof(key, b"client", nonce + other))

    async def prove_as_server(self, key: bytes) -> None:
        """Prove that this server knows the key, and check the client; errors as in `prove_as_client`."""
        self._keep_alive()
        other, nonce = await self._read_proof(), secrets.token_bytes(_NUM_BYTES)
        self._writer.write(nonce + _proof(key, b"server", other + nonce))
        _check(await self._read_proof(), key, b"client", other + nonce)


async def open_channel(address: ChannelAddress, name: str) -> Channel:
    """Connect to a server under a name; `OSError` or `EOFError` if it is not there, or another process is."""
    async with asyncio.timeout(_HANDSHAKE_S):
        reader, writer = await asyncio.open_connection(
            address.host, address.port, limit=_READ_AHEAD, ssl=_tls(ssl.Purpose.SERVER_AUTH)
        )
        channel = Channel(reader, writer)
        try:
            await channel.prove_as_client(address.key)
            channel.send(name)
        except BaseException:
            await channel.close()
            raise
    return channel


@define(eq=False)
class ChannelServer:
    """
    Accepts channels, each from a client with a name.

    Attributes:
        on_open: called with the number of a new channel, the name of its client, and a function that sends to it.
        on_message: called with the number of a channel and a message of its client.
        on_close: called with the number of a channel when its client has closed it or died.
    """

    on_open: Callable[[int, str, Send], None]
    on_message: Callable[[int, Any], None]
    on_close: Callable[[int], None]
    _key: bytes = field(factory=partial(secrets.token_bytes, _NUM_BYTES), init=False, repr=False)
    _server: asyncio.Server | None = field(default=None, init=False)
    _serving: set[asyncio.Task[None]] = field(factory=set, init=False)
    _num_opened: int = field(default=0, init=False)

    async def open(self, host: str) -> ChannelAddress:
        """Listen on a free port, and return the address for clients on this machine or others."""
        try:
            self._server = await self._listen(host)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            # An address that only a router translates, as some clouds have. Ray itself listens on all addresses.
            self._server = await self._listen("::" if ":" in host else "0.0.0.0")
        return ChannelAddress(host, self._server.sockets[0].getsockname()[1], self._key)

    async def _listen(self, host: str) -> asyncio.Server:
        return await asyncio.start_server(
            self._accept, host, 0, limit=_READ_AHEAD, backlog=_BACKLOG, ssl=_tls(ssl.Purpose.CLIENT_AUTH)
        )

    async def close(self) -> None:
        """Close all channels, and accept no more. Idempotent."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(Channel(reader, writer)))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, channel: Channel) -> None:
        number = None
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await channel.prove_as_server(self._key)
                name = await channel.receive()
            number = self._num_opened
            self._num_opened += 1
            self.on_open(number, name, channel.send)
            await channel.receive_all(partial(self.on_message, number))
        except (OSError, EOFError):  # also a failed proof, and a handshake that takes too long
            pass
        except BrokenChannelError as error:
            structlog.get_logger().warning("channel closed", channel=number, reason=str(error))
        finally:
            if number is not None:
                self.on_close(number)
            await channel.close()


def _unpickle(pickled: bytes) -> Any:
    try:
        return pickle.loads(pickled)  # the peer has proved that it is ours
    except Exception as error:
        raise BrokenChannelError(f"a message cannot be read: {describe(error)}") from error


def _check_length(length: int) -> None:
    if length > _MAX_BYTES:
        raise BrokenChannelError(f"a message of {length} bytes is above the limit of {_MAX_BYTES} bytes")


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, side + nonces, "sha256")


def _check(proof: bytes, key: bytes, side: bytes, nonces: bytes) -> None:
    if not hmac.compare_digest(proof, _proof(key, side, nonces)):
        raise ConnectionRefusedError(f"the {side.decode()} does not know the key of the channel")


def _tls(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """Return a context with Ray's certificates, for both sides; None if Ray does not encrypt its connections."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    # As in Ray, a certificate of the cluster's authority is enough, whatever address it names.
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    return context
