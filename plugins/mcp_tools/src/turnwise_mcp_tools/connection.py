"""
A connection to a server, which lives longer than one call.

The client of `mcp` must be closed by the task that opened it, and an episode opens, calls and releases in different
tasks, so a task of the connection holds the client from the start to the end.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Final, TextIO

import httpx2
import structlog
from anyio import CancelScope
from attrs import define, field
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.session import IncomingMessage
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, Implementation, ToolListChangedNotification

from turnwise.errors import InfrastructureError, describe
from turnwise_mcp_tools.config import ServerConfig
from turnwise_mcp_tools.last_lines import LastLines

CLOSE_S = 10.0
"""Seconds that a server may take to end; the client kills a program before that."""
_CONNECT_S = 10.0
_SHOWN_CHARS = 300


@define(eq=False)
class Connection:
    """
    One connection; `open` it before use and `close` it in every case.

    Attributes:
        name: of the server, for errors.
        server: the program or address.
        start_s: seconds that the start may take.
        call_s: seconds that a request may take.
        has_new_tools: whether the server said that its tools changed.
    """

    name: str
    server: ServerConfig
    start_s: float
    call_s: float
    has_new_tools: bool = field(default=False, init=False)
    _client: Client | None = field(default=None, init=False)
    _holder: asyncio.Task[None] | None = field(default=None, init=False)
    _connecting: CancelScope = field(factory=CancelScope, init=False)
    _closing: asyncio.Event = field(factory=asyncio.Event, init=False)
    _last_lines: list[str] = field(factory=list, init=False)
    _has_babbled: bool = field(default=False, init=False)

    @property
    def client(self) -> Client:
        """The connected client; `InfrastructureError` when there is none."""
        if self._client is None:
            raise InfrastructureError(f"MCP server {self.name!r} is not connected")
        return self._client

    async def open(self) -> None:
        """Start or reach the server; `InfrastructureError` with its last words when it does not answer."""
        loop = asyncio.get_running_loop()
        connected: asyncio.Future[Client] = loop.create_future()
        self._holder = loop.create_task(self._hold(connected), name=f"mcp-{self.name}")
        try:
            async with asyncio.timeout(self.start_s):
                self._client = await connected
        except BaseException as error:
            self._connecting.cancel()
            await self.close()
            if isinstance(error, TimeoutError):
                raise InfrastructureError(self._failure(f"did not answer within {self.start_s:g} s")) from error
            if isinstance(error, asyncio.CancelledError) or not isinstance(error, Exception):
                raise
            raise InfrastructureError(self._failure(f"cannot be used: {_first_error(error)}")) from error

    async def is_alive(self) -> bool:
        """Return whether the server answers another request, by whatever answer."""
        try:
            async with asyncio.timeout(self.call_s):
                await self.client.list_tools(cache_mode="refresh")
        except MCPError as error:
            return error.code != CONNECTION_CLOSED
        except (OSError, EOFError):
            return False
        return True

    async def close(self) -> None:
        """End the connection and the server's process; a server that resists is killed."""
        self._client = None
        self._closing.set()
        if self._holder is not None and not self._holder.done():
            done, _ = await asyncio.wait([self._holder], timeout=CLOSE_S)
            if not done:
                self._holder.cancel()
                await asyncio.wait([self._holder], timeout=CLOSE_S)

    def failure(self, error: BaseException) -> str:
        """Return one line about a closed connection that broke, with the last lines that its server printed."""
        return self._failure(f"ended: {_first_error(error)}")

    def _failure(self, problem: str) -> str:
        return "; ".join([f"MCP server {self.name!r} {problem}", *self._last_lines])

    async def _hold(self, connected: asyncio.Future[Client]) -> None:
        _CURRENT.set(self)  # a task has a context of its own, which the tasks of the client copy
        try:
            async with LastLines.of_pipe() as lines:
                try:
                    # A scope's cancellation lets the client end the program; that of the task would leave it behind.
                    with self._connecting:
                        async with self._connect(lines.pipe) as client:
                            if not connected.done():  # the opener may have left
                                connected.set_result(client)
                            await self._closing.wait()
                finally:
                    self._last_lines = lines.read()
        except BaseException as error:
            # An error after the start belongs to the calls, which fail with it.
            if not connected.done():
                connected.set_exception(error if isinstance(error, Exception) else ConnectionError("was cancelled"))
            elif isinstance(error, asyncio.CancelledError):
                raise

    @asynccontextmanager
    async def _connect(self, log: TextIO) -> AsyncIterator[Client]:
        async with AsyncExitStack() as stack:
            server = self.server
            if server.command:
                parameters = StdioServerParameters(
                    command=sys.executable if server.command == "python" else server.command,
                    args=list(server.args),
                    env=dict(server.env) or None,
                    cwd=server.cwd,
                )
                transport = stdio_client(parameters, errlog=log)
            else:
                timeout = httpx2.Timeout(self.call_s, connect=_CONNECT_S)
                http = httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout)
                transport = streamable_http_client(server.url, http_client=await stack.enter_async_context(http))
            client = Client(
                transport,
                # No timeout of its own: its error would look like an answer of the server.
                message_handler=self._on_message,
                client_info=Implementation(name="turnwise", version=version("turnwise-mcp-tools")),
            )
            yield await stack.enter_async_context(client)

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.has_new_tools = True

    def report_line(self, error: BaseException | None) -> None:
        """Log the first line of the server that is no message."""
        if not self._has_babbled:
            self._has_babbled = True
            reason = describe(error)[:_SHOWN_CHARS] if error else ""
            structlog.get_logger().warning(
                "MCP server prints lines that are no messages", server=self.name, reason=reason
            )


_CURRENT: Final[ContextVar[Connection | None]] = ContextVar("connection", default=None)
"""The connection whose client runs in this task."""


def _report_once(record: logging.LogRecord) -> bool:
    """Report the first line that is no message; the client logs a traceback for each."""
    connection = _CURRENT.get()
    if connection is None or not record.getMessage().startswith("Failed to parse"):
        return True
    connection.report_line(record.exc_info[1] if record.exc_info else None)
    return False


logging.getLogger("mcp.client.stdio").addFilter(_report_once)


def _first_error(error: BaseException) -> str:
    """Return the text of an error; of a group, of the first inside."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return describe(error)
