"""
The delivery of replies: a turn counts when its last byte was handed over to a client that is still there.

`Delivery` sees to it that each answer is confirmed or released, once, whichever way the handler ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

import structlog
from aiohttp import web
from attrs import define, evolve

from turnwise_gateway.calls import Answer, CallRefusedError, ModelReply, PartialReply, SessionBackend
from turnwise_gateway.dialects import Exchange, write_json
from turnwise_gateway.server.options import ServerOptions
from turnwise_gateway.server.receipt import Connection

SERVER_HEADERS = {"Server": "turnwise"}
_STREAM_HEADERS = {
    **SERVER_HEADERS,
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@define
class Delivery:
    """A call from its request to the end of its response; a context manager that releases what was not confirmed."""

    exchange: Exchange
    options: ServerOptions
    outlive: Callable[[asyncio.Future[None]], object] | None = None
    outcome: str = "cancelled"
    reply: ModelReply | None = None
    refusal: CallRefusedError | None = None
    _answer: Answer | None = None
    _partial_reply: PartialReply | None = None
    _last_write: float = 0.0
    _is_broken: bool = False

    def __enter__(self) -> Delivery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._answer is not None:
            self._answer.release()
            self._answer = None

    async def fetch(self, backend: SessionBackend) -> None:
        """Wait for the session; never raises, but for a cancellation."""
        try:
            # Nothing is awaited between the session's return and this assignment, so no answer can be lost.
            call = evolve(self.exchange.call, partial_reply=self._partial_reply, outlive=self.outlive)
            self._answer = await backend.answer(call)
            self.reply = self._answer.reply
        except CallRefusedError as error:
            self.refusal = error
        except asyncio.CancelledError:
            # The session may have ended a task that this one waited for, while the client is still there.
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            self.refusal = CallRefusedError("engine", "the session ended the call")
        except Exception as error:  # noqa: BLE001  # a session's bug must not look like the end of a stream
            structlog.get_logger().exception("a session failed to answer a call", error=str(error))
            self.refusal = CallRefusedError("engine", "the session failed to answer")

    async def respond(self, request: web.BaseRequest, backend: SessionBackend) -> web.StreamResponse:
        """
        Answer a request, by a stream if it asks for one.

        Raises:
            CallRefusedError: there is no answer, and no byte was sent yet.
        """
        if self.exchange.call.stream:
            return await self._respond_by_events(request, backend)
        await self.fetch(backend)
        body = self._compose()
        response = web.Response(body=body, content_type="application/json", headers=SERVER_HEADERS)
        await self._send(request, response, b"")
        return response

    async def _respond_by_events(self, request: web.BaseRequest, backend: SessionBackend) -> web.StreamResponse:
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        self._partial_reply = partial_reply = PartialReply()
        self._last_write = asyncio.get_running_loop().time()
        # All events are written by this task alone, so none of them can come between those of a part of the reply.
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(self.fetch(backend))
            while not fetching.done():
                if not await self._write_next(request, response, fetching, partial_reply):
                    fetching.cancel()
                    break
        if self._answer is None and self.refusal is None:
            self.outcome = "client_gone"
            return response
        try:
            events = self._compose()
        except CallRefusedError as refusal:
            # Before the first byte the refusal still has a status, which clients understand best.
            if not response.prepared:
                raise
            self.outcome = refusal.kind
            await self._break_stream(request, response, refusal)
            return response
        await self._send(request, response, events)
        return response

    def _compose(self) -> bytes:
        """Return the body or the events of the reply; `CallRefusedError` if there is none or it cannot be written."""
        if self.refusal is not None:
            self.outcome = self.refusal.kind
            raise self.refusal
        assert self.reply is not None, "a call ends with a reply or with a refusal"
        if self._is_broken:
            self.outcome = "engine"
            raise CallRefusedError("engine", "a part of the reply could not be written")
        try:
            if self.exchange.call.stream:
                return self.exchange.write_events(self.reply)
            return write_json(self.exchange.write_reply(self.reply))
        except Exception as error:
            structlog.get_logger().exception("a reply cannot be written", error=str(error))
            self.outcome = "engine"
            raise CallRefusedError("engine", "the reply cannot be written") from error

    async def _write_next(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        fetching: asyncio.Task[None],
        partial_reply: PartialReply,
    ) -> bool:
        """Wait for a part of the reply; send it, or a heartbeat if it is time; return whether the client is there."""
        loop = asyncio.get_running_loop()
        waiting = loop.create_task(partial_reply.changed.wait())
        seconds = max(0.0, self._last_write + self.options.heartbeat_s - loop.time())
        try:
            await asyncio.wait({fetching, waiting}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if fetching.done():
            return True
        events = self._write_part(partial_reply)
        if not events and loop.time() >= self._last_write + self.options.heartbeat_s:
            events = self.exchange.write_heartbeat()
        if events and not await self._write(request, response, events):
            return False
        await asyncio.wait({fetching}, timeout=self.options.delta_s)
        return True

    def _write_part(self, partial_reply: PartialReply) -> bytes:
        """Return the events of the next part of the reply; nothing if there is none."""
        partial_reply.changed.clear()
        if self._is_broken:
            return b""
        try:
            part = partial_reply.read()
        except Exception as error:  # noqa: BLE001  # the whole reply is still to come
            structlog.get_logger().exception("a part of a reply cannot be read", error=str(error))
            partial_reply.read = lambda: None
            return b""
        try:
            return b"" if part is None else self.exchange.write_part(part)
        except Exception as error:  # noqa: BLE001  # the turn is worth waiting for: a retry gets it
            structlog.get_logger().exception("a part of a reply cannot be written", error=str(error))
            self._is_broken = True
            return b""

    async def _write(self, request: web.BaseRequest, response: web.StreamResponse, events: bytes) -> bool:
        """Send events before the end of a stream; return whether the client has taken them."""
        try:
            async with asyncio.timeout(self.options.send_s):
                await response.prepare(request)
                await response.write(events)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
            return False
        self._last_write = asyncio.get_running_loop().time()
        return True

    async def _send(self, request: web.BaseRequest, response: web.StreamResponse, events: bytes) -> None:
        """Send a whole response, or the rest of a stream, and confirm the answer if the client has it."""
        assert self._answer is not None, "a reply comes with an answer"
        try:
            is_sent = await send_end(request, response, events, self.options.send_s)
        except TimeoutError:
            self.outcome = "client_too_slow"
            return
        except asyncio.CancelledError:
            # The client may have read all of it and left, or the server stops, before this task ran again.
            if connection_of(request).has_response:
                self._confirm(connection_of(request))
            raise
        if is_sent:
            self._confirm(connection_of(request))
        else:
            self.outcome = "client_gone"

    def _confirm(self, connection: Connection) -> None:
        assert self._answer is not None, "an answer is confirmed once"
        answer, self._answer = self._answer, None
        self.outcome = "delivered"
        answer.confirm()
        connection.watch(answer.lose)

    async def _break_stream(
        self, request: web.BaseRequest, response: web.StreamResponse, refusal: CallRefusedError
    ) -> None:
        """Send the error, and close the connection without the last chunk: half a reply must not pass for a whole."""
        try:
            await response.write(self.exchange.write_failure(refusal))
        except ConnectionError:
            self.outcome = "client_gone"
        if request.transport is not None:
            request.transport.close()


def connection_of(request: web.BaseRequest) -> Connection:
    """Return the connection of a request to this server."""
    assert isinstance(request.protocol, Connection), "this server makes the connections"
    return request.protocol


async def send_end(request: web.BaseRequest, response: web.StreamResponse, events: bytes, seconds: float) -> bool:
    """
    Send a whole response, or the rest of one.

    Returns:
        Whether the system took the last byte while the client was there. After a cancellation, `has_response` of the
        connection tells it.

    Raises:
        TimeoutError: the client did not take the bytes in time; the connection is broken off.
    """
    connection = connection_of(request)
    try:
        if (transport := request.transport) is not None:
            # Without a buffer, the drain after the last byte waits until the system has all of them.
            transport.set_write_buffer_limits(0)
        async with asyncio.timeout(seconds):
            await response.prepare(request)
            connection.begin_end()
            await response.write_eof(events)
    except ConnectionError:
        return False
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise
    return connection.has_response
