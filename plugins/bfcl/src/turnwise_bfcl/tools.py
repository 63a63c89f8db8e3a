"""The tools `bfcl`: the functions of the simulated programs, with a state for each episode."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from attrs import define, field, frozen

from turnwise import Task, Tool, ToolResult
from turnwise.errors import ConfigError, DataError, InfrastructureError, ToolError
from turnwise.types import JsonDict, ToolSchema
from turnwise_bfcl.calls import write_call
from turnwise_bfcl.multi_turn import entry_of, has_one_turn, read_functions
from turnwise_bfcl.simulator import CPU_S, ExhaustedError, Simulator, shared_simulator


@define(eq=False)
class Conversation:
    """
    The programs of one episode.

    Attributes:
        task: with the programs and their first state.
        calls: which have run, in this order, as names and arguments; they make the state.
    """

    task: Task
    calls: list[tuple[str, JsonDict]] = field(factory=list)
    _turn: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    async def run(self, simulator: Simulator, name: str, arguments: JsonDict) -> str:
        """
        Run a call and return the text for the model.

        Raises:
            ToolError: the call is none that can run; it leaves no trace.
            InfrastructureError: the task is of no multi-turn category, or the process with the programs cannot run.
        """
        try:
            entry = entry_of(self.task)
        except DataError as error:
            raise InfrastructureError(str(error)) from error  # not the model's doing, and no text for it
        # Calls of one turn come at once, and each needs the state that the one before it left.
        async with self._turn:
            calls = [*self.calls, (name, arguments)]
            try:
                texts = [write_call(*call) for call in calls]
                answer = await simulator.ask({"entry": entry, "calls": texts})
            except ExhaustedError:
                raise ToolError(
                    f"Error during execution: it needs more than {CPU_S:.0f} seconds of processor or too much memory"
                ) from None
            except (ValueError, RecursionError) as error:
                raise ToolError(str(error)) from error
            self.calls = calls
            return str(answer["text"])


@frozen(eq=False)
class ProgramTool:
    """
    One function of the programs.

    Attributes:
        schema: it accepts all arguments: as in the leaderboard, wrong ones reach the program. The model sees the
            schema in its task.
        session_key: the functions of all programs share the state of an episode.
    """

    schema: ToolSchema
    session_key: object = field(repr=False)

    async def create(self, task: Task) -> Conversation:
        """Return the programs of an episode, which start with its first call."""
        return Conversation(task)

    async def execute(self, session: Any, arguments: Mapping[str, object]) -> ToolResult:
        conversation: Conversation = session
        if has_one_turn(conversation.task):  # its function has the name of a program's, and nothing behind it
            return ToolResult(text="", ends_episode=True)
        text = await conversation.run(shared_simulator(), self.schema["function"]["name"], dict(arguments))
        return ToolResult(text=text, error=text.startswith("Error during execution:"))

    async def release(self, session: object) -> None:
        """Do nothing: no process belongs to an episode."""

    async def close_kept(self) -> None:
        """End the process with the programs, which all episodes share."""
        await shared_simulator().rest()

    async def suspend(self, session: Any) -> list[list[object]]:
        """Return the calls so far, for a later part of the episode."""
        conversation: Conversation = session
        return [list(call) for call in conversation.calls]

    async def restore(self, task: Task, notes: Any) -> Conversation:
        """Continue after the calls of `suspend`."""
        return Conversation(task, [(name, dict(arguments)) for name, arguments in notes])


def find_tool(tools: Mapping[str, Tool]) -> str | None:
    """Return the name of one of these tools; None in a run without them."""
    return next((name for name, tool in tools.items() if isinstance(tool, ProgramTool)), None)


def build_tools() -> tuple[ProgramTool, ...]:
    """Return a tool for each function; `ConfigError` when the leaderboard's wheel cannot be fetched."""
    try:
        names = [str(each["name"]) for functions in read_functions(None).values() for each in functions]
    except DataError as error:
        raise ConfigError(str(error)) from error
    key = object()
    return tuple(
        ProgramTool({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}, key)
        for name in names
    )
