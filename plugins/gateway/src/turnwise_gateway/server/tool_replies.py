"""
Keeps responses to calls of tools, for requests that come again because a response was lost.

A tool acts on its environment and may give a reward, so a call whose response was lost must not run once more. As with
turns of the model, a request is a repetition when it has the key of an earlier one, or equals one whose response no
client has read. Any other equal message is a further call.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from aiohttp import web
from attrs import define, field

from turnwise_gateway.calls import SessionBackend
from turnwise_gateway.dialects import write_json
from turnwise_gateway.server.delivery import SERVER_HEADERS, connection_of, send_end
from turnwise_gateway.server.mcp import answer_message

Name = tuple[str, bytes]
"""The key of a request, which may be empty, and a digest of its body."""
Written = tuple[int, bytes]
"""Status and body of a response."""


@define(eq=False)
class ToolReplies:
    """The responses of a session that a repeated request may get."""

    _kept: dict[Name, Written] = field(factory=dict, init=False)
    _running: dict[Name, asyncio.Lock] = field(factory=dict, init=False)

    async def respond(
        self, request: web.BaseRequest, body: bytes, backend: SessionBackend, send_s: float
    ) -> web.Response:
        """
        Answer a message, and keep the response if the client may not have read it.

        Args:
            request: with the message.
            body: of the request.
            backend: has the tools.
            send_s: seconds for the client to take the response.
        """
        name = request.headers.get("Idempotency-Key", ""), blake2b(body, digest_size=16).digest()
        status, written = await self._find(name, body, request, backend)
        response = web.Response(body=written, status=status, headers=SERVER_HEADERS)
        if not written:
            return response
        response.content_type = "application/json"
        connection, is_sent = connection_of(request), False

        def keep() -> None:
            self._kept[name] = status, written

        try:
            is_sent = await send_end(request, response, b"", send_s)
        except asyncio.CancelledError:
            is_sent = connection.has_response
            raise
        finally:
            if is_sent:
                connection.watch(keep)
            else:
                keep()
        return response

    async def _find(self, name: Name, body: bytes, request: web.BaseRequest, backend: SessionBackend) -> Written:
        """Return the response to the request that this one repeats, or a new one."""
        if not name[0]:
            return self._kept.pop(name, None) or await _answer(body, request, backend)
        # The first request may still run its tool. If its client leaves, the tool ends, and this request runs it again.
        async with self._running.setdefault(name, asyncio.Lock()):
            if name not in self._kept:
                self._kept[name] = await _answer(body, request, backend)
            return self._kept[name]


async def _answer(body: bytes, request: web.BaseRequest, backend: SessionBackend) -> Written:
    status, message = await answer_message(body, request.headers, backend)
    return status, write_json(message) if message else b""
