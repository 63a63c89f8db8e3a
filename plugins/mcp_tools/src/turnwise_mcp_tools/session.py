"""Sessions of a server: a connection for an episode, or one that the episodes of a process share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog
from attrs import define, field
from mcp import Client, MCPError
from mcp.types import CONNECTION_CLOSED

from turnwise.errors import InfrastructureError, ToolError
from turnwise_mcp_tools.config import McpConfig, ServerConfig
from turnwise_mcp_tools.connection import Connection

T = TypeVar("T")

_BROKEN: Final = (OSError, EOFError)


@define(eq=False)
class Session:
    """
    A connection that is made again when its server dies.

    Attributes:
        name: of the server.
        server: the program or address.
        config: seconds and number of restarts.
        num_restarts: of the server so far.
    """

    name: str
    server: ServerConfig
    config: McpConfig
    num_restarts: int = field(default=0, init=False)
    _connection: Connection | None = field(default=None, init=False)
    _restarting: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    async def open(self) -> None:
        """Connect; `InfrastructureError` when the server cannot be used."""
        connection = Connection(self.name, self.server, self.config.start_s, self.config.call_s)
        await connection.open()
        self._connection = connection

    async def close(self) -> None:
        """End the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    @property
    def has_new_tools(self) -> bool:
        """Whether the server said that its tools changed."""
        return self._connection is not None and self._connection.has_new_tools

    async def ask(self, request: Callable[[Client], Awaitable[T]]) -> T:
        """
        Send a request, and start the server again when it died.

        The request is not repeated: the server may have acted on it before it died.

        Raises:
            ToolError: with a text for the model: the server refused, was too slow, or died and was started again.
            InfrastructureError: the server died more often than `restarts`, or does not start again.
        """
        connection = self._connection
        if connection is None:
            raise InfrastructureError(f"MCP server {self.name!r} is not connected")
        try:
            async with asyncio.timeout(self.config.call_s):
                return await request(connection.client)
        except TimeoutError as error:
            raise ToolError(f"Error: no answer within {self.config.call_s:g} s") from error
        except MCPError as error:
            # A client's own error has the code of a closed connection, which servers use for other errors too.
            if error.code != CONNECTION_CLOSED or await connection.is_alive():
                raise ToolError(f"Error: {error.message}") from error
            broken: Exception = error
        except _BROKEN as error:
            broken = error
        await self._restart(connection, broken)
        raise ToolError("Error: the server ended during the call and was started again; its state is lost") from broken

    async def _restart(self, dead: Connection, error: Exception) -> None:
        # Calls run in parallel, and each of them finds the dead connection: the first one replaces it.
        async with self._restarting:
            if self._connection is not dead:
                return
            await dead.close()
            failure = dead.failure(error)
            if self.num_restarts >= self.config.restarts:
                raise InfrastructureError(failure) from error
            self.num_restarts += 1
            structlog.get_logger().warning("MCP server is started again", server=self.name, error=failure)
            await self.open()


@define(eq=False)
class SharedSession:
    """A session that is open while an episode uses it."""

    session: Session
    _num_users: int = field(default=0, init=False)
    _changing: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    async def acquire(self) -> Session:
        """Open the session for its first user."""
        async with self._changing:
            if self._num_users == 0:
                await self.session.open()
            self._num_users += 1
        return self.session

    async def release(self) -> None:
        """Close the session after its last user."""
        async with self._changing:
            self._num_users -= 1
            if self._num_users == 0:
                await self.session.close()
