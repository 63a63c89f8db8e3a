"""The receipt of requests: slow, oversized and broken ones end before a session sees them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from aiohttp import web
from attrs import define, field

from turnwise.descriptors import raise_descriptor_limit
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.limits import CallLimits
from turnwise_gateway.server.options import ServerOptions
from turnwise_gateway.server.quiet_log import SERVER_LOGGER
from turnwise_gateway.server.waiting import WaitingConnections, bound_of


class Connection(web.RequestHandler):
    """
    A connection that is closed if its first request has no whole head in time; aiohttp limits the later ones.

    It knows whether the client has a response. A client that closes its end in order has read everything: with unread
    bytes, its system breaks the connection instead. `home` is the one session that its listener serves; None for all
    sessions that have no separate listener.
    """

    __slots__ = (
        "_deadline",
        "_had_all",
        "_is_broken",
        "_is_ending",
        "_is_full",
        "_is_left",
        "_on_break",
        "_proved",
        "_receive_s",
        "_waiting",
        "home",
    )

    def __init__(
        self, server: web.Server, receive_s: float, waiting: WaitingConnections, home: object, **options: Any
    ) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self.home = home
        self._receive_s, self._waiting = receive_s, waiting
        self._proved: weakref.ref[object] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._on_break: Callable[[], None] | None = None
        self._is_ending = self._is_full = self._is_left = self._had_all = self._is_broken = False

    @property
    def has_response(self) -> bool:
        """Whether the system took the last byte of the response while the client was there."""
        if self._is_left:
            return self._had_all
        # A transport whose write has failed is closing, and reports the end of the connection later.
        return self._gave_all and self.transport is not None and not self.transport.is_closing()

    @property
    def _gave_all(self) -> bool:
        return self._is_ending and not self._is_full

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._waiting.add(self, is_known=False)
        self._deadline = asyncio.get_running_loop().call_later(self._receive_s, self.force_close)

    def pause_writing(self) -> None:
        self._is_full = True
        super().pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        super().resume_writing()

    def eof_received(self) -> None:
        self._note_leaving()
        super().eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._note_leaving()
        self._waiting.remove(self)
        self._is_broken = exc is not None
        self._end_deadline()
        on_break, self._on_break = self._on_break, None
        if self._is_broken and on_break is not None:
            on_break()
        super().connection_lost(exc)  # cancels the handler

    def begin_request(self) -> None:
        """Say that the head of a request is whole; its client has read the response to the earlier request."""
        self._end_deadline()
        self._waiting.remove(self)
        self._is_ending, self._on_break = False, None

    def prove(self, session: object) -> None:
        """Say that a request had the right key of a session, and that the session answers this connection."""
        self._proved = weakref.ref(session)

    def is_proved(self, session: object) -> bool:
        """Return whether the last right key was that of this session."""
        return self._proved is not None and self._proved() is session

    def end_request(self) -> None:
        """Say that a request has its response; the connection waits for the next one, unless the client has left."""
        if self.transport is not None:
            self._waiting.add(self, is_known=self._proved is not None)

    def begin_end(self) -> None:
        """Say that the last bytes of a response go to the transport next, which has no buffer."""
        self._is_ending = True

    def watch(self, on_break: Callable[[], None]) -> None:
        """Call a function if the connection breaks before the next request, or has broken already."""
        if self._is_broken:
            on_break()
        else:
            self._on_break = on_break

    def _note_leaving(self) -> None:
        if not self._is_left:
            self._had_all, self._is_left = self._gave_all, True

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class AgentsServer(web.Server):
    """Builds the connections of a port, or of one session. A handler ends as soon as its client has left."""

    def __init__(self, handler: Any, options: ServerOptions, home: object = None, **more: Any) -> None:
        super().__init__(handler, handler_cancellation=True, **more)
        self._options, self._home = options, home
        most = bound_of(raise_descriptor_limit()) if options.max_waiting is None else options.max_waiting
        self._waiting = WaitingConnections(most)

    def __call__(self) -> Connection:
        seconds = self._options.receive_s
        return Connection(
            self,
            seconds,
            self._waiting,
            self._home,
            access_log=None,
            logger=SERVER_LOGGER,
            auto_decompress=False,
            keepalive_timeout=self._options.keepalive_s,
            lingering_time=min(seconds, 10.0),
        )


@define
class _Incoming:
    """The parts of a body, as long as it is within the limits; then the refusal."""

    max_bytes: int
    limits: CallLimits
    refusal: CallRefusedError | None = None
    _parts: list[bytes] = field(factory=list, init=False)
    _size: int = field(default=0, init=False)

    def announce(self, num_bytes: int) -> None:
        """Take note of a number of bytes that the body has, or has at least."""
        if self.refusal is None and num_bytes > self.max_bytes:
            self.refusal = CallRefusedError("too_large", f"the body has more than {self.max_bytes} bytes")
        if self.refusal is None:
            self.refusal = self.limits.find_excess(num_bytes)

    def add(self, part: bytes) -> None:
        self._size += len(part)
        self.announce(self._size)
        if self.refusal is None:
            self._parts.append(part)
        else:
            self._parts.clear()

    def whole(self) -> bytes:
        if self.refusal is not None:
            raise self.refusal
        return b"".join(self._parts)


async def read_body(request: web.BaseRequest, options: ServerOptions, limits: CallLimits) -> bytes:
    """
    Return the body of a request.

    A body over the limit is read to its end all the same: a client whose connection breaks while it sends would not
    read the response, and would try again.

    Raises:
        CallRefusedError: it is too large for the server or for the context, compressed, broken, or not here in time.
    """
    body = _Incoming(options.max_body_bytes, limits)
    if request.content.is_eof():  # it came with its head
        body.add(_read_received(request))
        return _check_coding(request, body.whole())
    body.announce(request.content_length or 0)
    _expect_body(request)
    try:
        async with asyncio.timeout(options.receive_s):
            async for part in request.content.iter_any():
                body.add(part)
    except TimeoutError as error:
        raise CallRefusedError("timeout", f"the body did not come within {options.receive_s:g} s") from error
    except web.RequestPayloadError as error:
        raise CallRefusedError("invalid", "the body has no valid transfer encoding") from error
    return _check_coding(request, body.whole())


def _read_received(request: web.BaseRequest) -> bytes:
    try:
        return request.content.read_nowait()
    except web.RequestPayloadError as error:
        raise CallRefusedError("invalid", "the body has no valid transfer encoding") from error


def _check_coding(request: web.BaseRequest, body: bytes) -> bytes:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise CallRefusedError("encoded", "compressed bodies are not read")
    return body


def _expect_body(request: web.BaseRequest) -> None:
    # aiohttp answers this header in applications, and not in the low-level server.
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
