"""The tools of a run, and the sessions of them that episodes open (see `turnwise.tools.session`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager

import structlog
from attrs import field, frozen

from turnwise.errors import ConfigError, is_cancelled
from turnwise.protocols import KeepingTool, Tool
from turnwise.tools.schema import CompiledSchema, compile_schema
from turnwise.tools.session import CLOSING, SESSION_KEY, SUSPENDING, ToolSession, can_close_kept
from turnwise.types import JsonObject, Task, ToolResult, ToolSchema


def tools_by_name(tools: Iterable[Tool] | Mapping[str, Tool]) -> Mapping[str, Tool]:
    """Return tools by the names in their schemas; `ConfigError` when two have one name."""
    by_name: dict[str, Tool] = {}
    for tool in tools.values() if isinstance(tools, Mapping) else tools:
        name = compile_schema(tool.schema, type(tool).__qualname__).name
        if name in by_name:
            raise ConfigError(f"two tools are named {name!r}: give one of them another name in its schema")
        by_name[name] = tool
    return by_name


@frozen(eq=False)
class ToolBox:
    """
    The tools of a run, ready to be called in many episodes at once.

    Making one raises `ConfigError` when a schema is not valid or two tools have one name.

    Attributes:
        tools: by name, in configured order.
        release_s: seconds that releasing a session of one tool may take.
    """

    tools: Mapping[str, Tool] = field(converter=tools_by_name)
    release_s: float = 30.0
    _compiled: Mapping[str, CompiledSchema] = field(init=False, repr=False)

    @_compiled.default
    def _compile(self) -> Mapping[str, CompiledSchema]:
        return {name: compile_schema(tool.schema) for name, tool in self.tools.items()}

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """The schemas of all tools, in configured order."""
        return tuple(tool.schema for tool in self.tools.values())

    @asynccontextmanager
    async def session(self, task: Task, notes: JsonObject | None = None) -> AsyncIterator[ToolSession]:
        """Open an episode's sessions and release them at the end; `notes` come from `ToolSession.suspend`."""
        session = self.open_session(task, notes or {})
        try:
            yield session
        finally:
            await session.release()

    def open_session(self, task: Task, notes: JsonObject) -> ToolSession:
        """Return what `session` opens; the caller releases it."""
        return ToolSession(task, self.tools, self._compiled, self.release_s, notes)

    async def close_kept(self) -> None:
        """Close the resources that tools keep between episodes; a failure is logged and stops no other."""
        for name, tool in self.tools.items():
            if can_close_kept(tool):
                await self._close_kept(name, tool)

    async def _close_kept(self, name: str, tool: KeepingTool) -> None:
        try:
            async with asyncio.timeout(self.release_s):
                await tool.close_kept()
        except BaseException as error:  # as for a release, a tool may raise anything
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            structlog.get_logger().warning("tool failed to close its kept resources", tool=name, error=repr(error))


@frozen(eq=False)
class DescribedTool:
    """A tool under another schema: another name, other descriptions or narrower parameters."""

    tool: Tool
    schema: ToolSchema

    async def create(self, task: Task) -> object:
        return await self.tool.create(task)

    async def execute(self, session: object, arguments: JsonObject) -> ToolResult:
        return await self.tool.execute(session, arguments)

    async def release(self, session: object) -> float | None:
        return await self.tool.release(session)

    def __getattr__(self, name: str) -> object:
        """Return the `suspend`, `restore`, `session_key` and `close_kept` of a tool that has them."""
        if name in (*SUSPENDING, SESSION_KEY, CLOSING):
            return getattr(self.tool, name)
        raise AttributeError(name)
