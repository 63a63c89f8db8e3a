"""The contracts of tools, parsers of tool calls, and simulated users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from turnwise.types import (
    JsonObject,
    Message,
    Reply,
    Task,
    TokenArray,
    ToolCall,
    ToolResult,
    ToolSchema,
)

if TYPE_CHECKING:
    from turnwise.messages import TurnSoFar  # it imports asyncio, and the list of commands is fast


@runtime_checkable
class ToolParser(Protocol):
    """Finds tool calls in sampled tokens."""

    def parse(self, token_ids: TokenArray) -> tuple[str, tuple[ToolCall, ...]]:
        """
        Return the text outside the calls, and the calls in order.

        Never raises: a malformed call is a `ToolCall` with `error` set.
        """


class TurnStream(Protocol):
    """Reads one turn while it is sampled."""

    def read(self, text: str, *, is_whole: bool = False) -> TurnSoFar:
        """
        Return the decided part of the turn. Never raises.

        Each result continues those before: its calls have the same names and ids, and each text and each call's
        arguments begin with the earlier ones. A complete call stays as it is. The result of a whole turn depends on
        the text alone. Its texts together are the text that `parse` returns, and it has the same calls as `parse`, the
        good ones complete and with equal arguments.

        Args:
            text: of the turn, decoded, so far; it begins with the text of the call before.
            is_whole: the turn has ended.
        """


@runtime_checkable
class StreamingParser(Protocol):
    """A tool parser that reads the calls of a turn while it is sampled. Other tool parsers lack the method."""

    def follow(self, tools: Sequence[ToolSchema]) -> TurnStream:
        """Return the reader of one turn whose prompt has these tools; arguments have the types in their schemas."""


@runtime_checkable
class ReasoningParser(Protocol):
    """Finds the reasoning in the text of a turn."""

    def split(self, text: str) -> tuple[str, str]:
        """Return the reasoning, empty for none, and the rest of the text. Never raises."""


@runtime_checkable
class ReasoningFormat(Protocol):
    """A tool parser whose format has a form for reasoning, too. Other tool parsers lack the attribute."""

    @property
    def reasoning_parser(self) -> ReasoningParser | None:
        """The parser of the reasoning, for runs that configure none."""


class ToolFormat(Protocol):
    """The text of tools and of their calls, for models whose chat template has none."""

    def describe(self, tools: Sequence[ToolSchema]) -> str:
        """
        Return what a system prompt says of the tools: their schemas, and how to call them.

        `TemplateError` for a tool that cannot be called in the format.
        """

    def write_turn(self, content: str, calls: Sequence[tuple[str, JsonObject]]) -> str:
        """
        Return a turn of the model with calls, each given by its name and its arguments.

        `TemplateError` for a call that the parser would not read back.
        """


@runtime_checkable
class FormattedParser(Protocol):
    """A tool parser that can write its format. Other tool parsers lack the attribute."""

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format; None if it has no text for prompts."""


@runtime_checkable
class Tool(Protocol):
    """A tool of the model. One object serves many episodes at once; a `session` holds the state of one episode."""

    @property
    def schema(self) -> ToolSchema:
        """OpenAI function schema: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""

    async def create(self, task: Task) -> object:
        """Open an episode's session before its first call; the other methods get the returned value."""

    async def execute(self, session: object, arguments: Mapping[str, Any]) -> ToolResult:
        """
        Run one call; the arguments fit the schema. Calls of one session may run at the same time.

        Raises `ToolError` with a text that the model should read before it tries again, and `InfrastructureError` when
        the failure is not the model's doing. The model sees any other exception as an error, too.
        """

    async def release(self, session: object) -> float | None:
        """Close the session, in every case, and return a reward for the whole session or None."""


@runtime_checkable
class KeepingTool(Protocol):
    """A tool that keeps something between episodes, such as machines that have started ahead."""

    async def close_kept(self) -> None:
        """
        Close the resources that the tool keeps for later episodes. Idempotent; the tool may be used again.

        A worker calls it when it stops, on the event loop of its episodes, if one of them could use the tool.
        """


@runtime_checkable
class Interaction(Protocol):
    """A user simulator: it answers turns of the model that call no tool."""

    async def create(self, task: Task) -> object:
        """Open a session."""

    async def respond(self, session: object, messages: Sequence[Message]) -> Reply:
        """Answer the conversation so far, whose last message is the model's."""

    async def release(self, session: object) -> None:
        """Close the session, in every case."""
