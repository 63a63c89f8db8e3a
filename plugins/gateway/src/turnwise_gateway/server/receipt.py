"""The receipt of requests: slow, oversized and broken ones end before a session sees them."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.server.options import ServerOptions


class Connection(web.RequestHandler):
    """A connection that is closed if its first request has no whole head in time; aiohttp limits the later ones."""

    __slots__ = ("_deadline", "_receive_s")

    def __init__(self, server: web.Server, receive_s: float, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._receive_s = receive_s
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._deadline = asyncio.get_running_loop().call_later(self._receive_s, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.end_deadline()
        super().connection_lost(exc)

    def end_deadline(self) -> None:
        """Say that the head of a request is whole."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class AgentsServer(web.Server):
    """Builds the connections. A handler ends as soon as its client has left."""

    def __init__(self, handler: Any, options: ServerOptions) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._options = options

    def __call__(self) -> Connection:
        seconds = self._options.receive_s
        return Connection(
            self,
            seconds,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=self._options.keepalive_s,
            lingering_time=min(seconds, 10.0),
        )


async def read_body(request: web.BaseRequest, options: ServerOptions) -> bytes:
    """
    Return the body of a request.

    A body over the limit is read to its end all the same: a client whose connection breaks while it sends would not
    read the response, and would try again.

    Raises:
        CallRefusedError: it is too large, compressed, broken, or not here in time.
    """
    if request.content.is_eof() and request.content.total_bytes <= options.max_body_bytes:  # it came with its head
        return _check_coding(request, _read_received(request))
    _expect_body(request)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(options.receive_s):
            async for part in request.content.iter_any():
                size += len(part)
                if size <= options.max_body_bytes:
                    parts.append(part)
                else:
                    parts.clear()
    except TimeoutError as error:
        raise CallRefusedError("timeout", f"the body did not come within {options.receive_s:g} s") from error
    except web.RequestPayloadError as error:
        raise CallRefusedError("invalid", "the body has no valid transfer encoding") from error
    if size > options.max_body_bytes:
        raise CallRefusedError("too_large", f"the body has more than {options.max_body_bytes} bytes")
    return _check_coding(request, b"".join(parts))


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
