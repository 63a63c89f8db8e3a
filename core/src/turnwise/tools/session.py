"""
Tool sessions of an episode: created with the first call, released at the end, or suspended at an interruption.

A failing call returns a text that the model reads. Only a failure that is not the model's doing raises. Deadlines and
metrics belong to `turnwise.episode.live`, truncation to the agents.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from numbers import Real
from typing import Final, Protocol, TypeGuard

import structlog
from attrs import define, evolve, field

from turnwise.errors import EngineError, InfrastructureError, ToolError, boundary, is_cancelled
from turnwise.messages import MAX_TOOL_NAME, unknown_tool
from turnwise.protocols import Interaction, KeepingTool, Tool
from turnwise.report import Report
from turnwise.tools.schema import CompiledSchema
from turnwise.types import JsonDict, JsonObject, Task, ToolCall, ToolResult, copy_json

SUSPENDING: Final = ("suspend", "restore")
"""The methods of `Suspendable`."""
SESSION_KEY: Final = "session_key"
"""Optional attribute of a tool: tools with an equal key share one session in an episode, as tools of one server do."""
CLOSING: Final = "close_kept"
"""Optional method of a tool: see `turnwise.protocols.KeepingTool`."""


class Suspendable(Protocol):
    """Optional methods of a tool or a simulated user whose sessions can outlive their process."""

    async def suspend(self, session: object) -> object:
        """Close a session and return a JSON value; replaces `release`."""

    async def restore(self, task: Task, notes: object) -> object:
        """Open a session from the notes of `suspend`; replaces `create`."""


def can_suspend(owner: object) -> TypeGuard[Suspendable]:
    """Return whether sessions of a tool or a simulated user can be suspended and restored."""
    # Not by isinstance, which from Python 3.12 on looks past `__getattr__`, and so past wrapped tools.
    return all(hasattr(owner, name) for name in SUSPENDING)


def can_close_kept(tool: object) -> TypeGuard[KeepingTool]:
    """Return whether a tool keeps something between episodes."""
    return hasattr(tool, CLOSING)  # not by isinstance, as above


async def create_session(owner: Tool | Interaction, task: Task, notes: object) -> object:
    """Open a session of a tool or a simulated user, from notes where there are some."""
    if notes is not None and can_suspend(owner):
        return await owner.restore(task, notes)
    return await owner.create(task)


@define(eq=False)
class ToolSession:
    """
    The tool sessions of one episode; each tool's session opens with its first call.

    Attributes:
        released_reward: sum of the rewards that releases returned; 0.0 before.
        release_failures: exceptions of releases by tool name; they are logged too.
    """

    _task: Task
    _tools: Mapping[str, Tool]
    _compiled: Mapping[str, CompiledSchema]
    _release_s: float
    _notes: JsonObject
    released_reward: float = field(default=0.0, init=False)
    release_failures: dict[str, BaseException] = field(factory=dict, init=False)
    # By the name of the tool that opened it: tools with one session key use the session of the first of them.
    _sessions: dict[str, object] = field(factory=dict, init=False)
    _creating: dict[str, asyncio.Lock] = field(factory=dict, init=False)

    @property
    def is_open(self) -> bool:
        """Whether any tool has an open session."""
        return bool(self._sessions)

    async def call(self, call: ToolCall) -> ToolResult:
        """
        Run one call; calls may run at the same time.

        Returns:
            The tool's result, or a result with `error` and a text for the model: the call is malformed, the tool is
            unknown, an argument is wrong, or the tool raised.

        Raises:
            InfrastructureError, EngineError: a service under the tool failed, which is not the model's doing.
        """
        complaint = self._complaint(call)
        if complaint:
            return ToolResult(text=complaint, error=True)
        try:
            return await self._execute(call)
        except (InfrastructureError, EngineError, KeyboardInterrupt, GeneratorExit):
            raise
        except ToolError as error:
            return ToolResult(text=_encodable(str(error)), error=True)
        except BaseException as error:  # a tool may raise anything, exits included; the model reads it
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            text = f"Error: {type(error).__name__}" + (f": {error}" if str(error) else "")
            return ToolResult(text=_encodable(text), error=True)

    async def open(self, name: str) -> object:
        """Return the session of a tool, which opens now if no call has opened it; `ToolError` for an unknown tool."""
        if name not in self._tools:
            raise ToolError(unknown_tool(name, self._tools))
        with boundary("tool", label_tool(name)):
            return await self._session_of(self._opener(name))

    async def release(self) -> None:
        """Close every open session; a failing one is reported and stops no other."""
        sessions, self._sessions = self._sessions, {}
        if len(sessions) < 2:
            for name, session in sessions.items():
                await self._release(name, session)
            return
        # Together, so that a cancellation reaches each of them and a slow one delays no other.
        async with asyncio.TaskGroup() as group:
            for name, session in sessions.items():
                group.create_task(self._release(name, session))

    async def suspend(self) -> JsonDict:
        """
        Suspend the sessions of all tools that support it, and return their notes by tool name.

        A session that fails to suspend, or takes longer than a release may, is released like the others.
        """
        notes: JsonDict = {}
        for name, session in tuple(self._sessions.items()):
            tool: object = self._tools[name]
            if not can_suspend(tool):
                continue
            try:
                async with asyncio.timeout(self._release_s):
                    notes[name] = await tool.suspend(session)
                del self._sessions[name]
            except BaseException as error:  # reported; the episode resumes without these notes
                if isinstance(error, asyncio.CancelledError) and is_cancelled():
                    raise
                structlog.get_logger().warning("tool cannot be suspended", tool=name, error=repr(error))
        return notes

    def _complaint(self, call: ToolCall) -> str:
        if call.error:
            return call.error
        compiled = self._compiled.get(call.name)
        if compiled is None:
            return unknown_tool(call.name, self._tools)
        complaint = compiled.complaint(call.arguments)
        return f"Error: the arguments of {call.name!r} do not fit: {complaint}" if complaint else ""

    async def _execute(self, call: ToolCall) -> ToolResult:
        session = await self._session_of(self._opener(call.name))
        # A copy: the journal recognizes the call by its arguments, and a tool may change them.
        result: object = await self._tools[call.name].execute(session, copy_json(dict(call.arguments)))
        if not isinstance(result, ToolResult):
            raise TypeError(f"the tool returned {type(result).__name__} in place of a ToolResult")
        _check_result(result)
        text = _encodable(result.text)  # as long as before, so pictures keep their places
        return result if text is result.text else evolve(result, text=text)

    def _opener(self, name: str) -> str:
        """Return the tool that opens the session of a tool: the first with the same `session_key`."""
        key: object = getattr(self._tools[name], SESSION_KEY, None)
        if key is None:
            return name
        return next(each for each, tool in self._tools.items() if getattr(tool, SESSION_KEY, None) == key)

    async def _session_of(self, name: str) -> object:
        if name not in self._sessions:
            # Calls of one turn run together; the first of them creates, the others wait for it.
            async with self._creating.setdefault(name, asyncio.Lock()):
                if name not in self._sessions:
                    self._sessions[name] = await create_session(self._tools[name], self._task, self._notes.get(name))
        return self._sessions[name]

    async def _release(self, name: str, session: object) -> None:
        try:
            async with asyncio.timeout(self._release_s):
                reward = await self._tools[name].release(session)
            self.released_reward += _finite(reward) or 0.0
        except BaseException as error:  # reported; a failing release must not affect the episode or other tools
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            self.release_failures[name] = error
            structlog.get_logger().warning("tool release failed", tool=name, error=repr(error))


def label_tool(name: str) -> str:
    """Return the name of a tool for errors, which a model may have made up."""
    return f"tool {name[:MAX_TOOL_NAME]!r}"


async def call_tool(session: ToolSession | None, call: ToolCall) -> ToolResult:
    """Run one call in an episode; see `ToolSession.call`."""
    if session is None:
        return ToolResult(text=f"Error: there is no tool {call.name!r}: this run has no tools", error=True)
    return await session.call(call)


async def open_tool(session: ToolSession | None, name: str) -> object:
    """Return the session of a tool in an episode; `ToolError` when the run has no tools, or no such tool."""
    if session is None:
        raise ToolError(f"there is no tool {name!r}: this run has no tools")
    return await session.open(name)


def _check_result(result: ToolResult) -> None:
    """Refuse here, where the tool is to blame, values that the totals and files of the episode cannot take."""
    if not isinstance(result.report, Report | None):
        raise TypeError(f"the tool returned the report {result.report!r:.100}, expected a Report or None")
    _finite(result.reward)
    for name, value in result.metrics.items():
        if not isinstance(value, Real):
            raise TypeError(f"the tool gave the metric {name!r} the value {value!r}, expected a number")
    for name in ("error", "ends_episode"):
        if (value := getattr(result, name)) not in (True, False):
            raise TypeError(f"the tool returned {name}={value!r}, expected True or False")


def _finite(reward: float | None) -> float | None:
    if reward is not None and not math.isfinite(reward):
        raise ValueError(f"the tool gave a reward that is not finite: {reward}")
    return reward


def _encodable(text: str) -> str:
    """Return a text that every tokenizer accepts: lone surrogates, as in file names, become question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text
