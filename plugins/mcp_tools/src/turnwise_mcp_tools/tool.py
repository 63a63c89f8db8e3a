"""The tools of a server as tools of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import structlog
from attrs import define, field, frozen
from mcp import Client

from turnwise import Task, ToolResult
from turnwise.errors import ToolError
from turnwise.types import JsonObject, ToolSchema
from turnwise_mcp_tools.client_requests import list_tools
from turnwise_mcp_tools.config import McpConfig, ServerConfig
from turnwise_mcp_tools.session import Session, SharedSession

Request = Callable[[Client, Mapping[str, Any]], Awaitable[ToolResult]]
"""Sends a request with the arguments of a call."""


@define(eq=False)
class Server:
    """
    A server of a run; its tools share one session in an episode.

    Attributes:
        name: in the config.
        server: the program or address.
        config: the rules of its sessions.
    """

    name: str
    server: ServerConfig
    config: McpConfig
    _shared: SharedSession | None = field(default=None, init=False)
    _changed: set[str] = field(factory=set, init=False)

    def new_session(self) -> Session:
        """Return a session that is not open."""
        return Session(self.name, self.server, self.config)

    async def open(self) -> Session:
        """Open an episode's session."""
        if self.config.session == "shared":
            if self._shared is None:
                self._shared = SharedSession(self.new_session())
            return await self._shared.acquire()
        session = self.new_session()
        await session.open()
        return session

    async def close(self, session: Session) -> None:
        """End an episode's session."""
        if self._shared is not None:
            await self._shared.release()
        else:
            await session.close()

    async def check_tool(self, session: Session, name: str, parameters: JsonObject) -> None:
        """
        Compare a tool with the server's new list of tools.

        A changed tool is called all the same, and logged once: the schema in the prompts of a run does not change.

        Raises:
            ToolError: the server has removed the tool.
        """
        current = {tool.name: tool for tool in await session.ask(list_tools)}
        if name not in current:
            raise ToolError(f"Error: the server has removed the tool {name!r}")
        if current[name].input_schema != parameters and name not in self._changed:
            self._changed.add(name)
            structlog.get_logger().warning("MCP server changed a tool during the run", server=self.name, tool=name)


@frozen(eq=False)
class ServerTool:
    """
    A tool of the model.

    Attributes:
        schema: which the model sees.
        server: that answers its calls.
        request: sends one.
        listed: its name on the server, empty for what is no tool there, and its parameters there.
    """

    schema: ToolSchema
    server: Server
    request: Request
    listed: tuple[str, JsonObject] = ("", {})

    @property
    def session_key(self) -> object:
        """All tools of a server use one session."""
        return self.server

    async def create(self, _task: Task) -> Session:
        return await self.server.open()

    async def execute(self, session: Any, arguments: Mapping[str, object]) -> ToolResult:
        opened: Session = session
        if opened.has_new_tools and self.listed[0]:
            await self.server.check_tool(opened, *self.listed)
        restarts = opened.num_restarts
        try:
            return await opened.ask(lambda client: self.request(client, arguments))
        except ToolError as error:
            if opened.num_restarts == restarts:
                raise
            return ToolResult(text=str(error), error=True, metrics={"mcp_restarts": opened.num_restarts - restarts})

    async def release(self, session: Any) -> None:
        await self.server.close(session)
