"""The contracts of tokenizers and chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from turnwise.protocols.tool import ToolFormat
from turnwise.types import MediaTokens, Message, Picture, TokenArray, ToolSchema

COMPARED_METRIC: Final = "template/compared_conversations"
"""Metric of an episode whose conversation a chat has compared; see `CheckedChat`."""


class Tokenizer(Protocol):
    """Text to ids and back, without special treatment of either end."""

    @property
    def eos_token_id(self) -> int | None:
        """The model's end-of-turn id, if it has one."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text; special tokens spelled in it are parsed, none is added."""

    def decode(self, token_ids: Sequence[int] | TokenArray) -> str:
        """Return the text of the ids, special tokens included."""


@runtime_checkable
class Chat(Protocol):
    """
    Turns messages into token ids, and only appends: ids of a prompt once, then only the ids of new messages.

    Sampled tokens are never rendered or encoded again. `turnwise_chat_templates` has the chat of Jinja templates.
    """

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn of the model."""

    def guard(self, content: str) -> str:
        """
        Return a text from outside as `tokenizer.encode` must get it, for agents that encode texts without a template.

        An option of the chat decides how the special tokens in it are treated; `DataError` if it refuses them.
        """

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> TokenArray:
        """Return (P,) ids of a conversation up to the start of the model's turn."""

    def delta(self, messages: Sequence[Message], last_token_id: int, *, with_tools: bool = True) -> TokenArray:
        """
        Return (n,) ids that new messages append after a turn of the model, up to the start of its next turn.

        `last_token_id` is the record's last id: a truncated turn without its end-of-turn token is closed first.
        `with_tools` is whether the prompt has tools; some templates move these to the newest message.
        """

    def text(self, token_ids: Sequence[int] | TokenArray) -> str:
        """Return the text of a turn of the model, without its end-of-turn token."""


@runtime_checkable
class PictureChat(Protocol):
    """
    A chat that shows pictures of messages; their form is in `turnwise.media`. `prompt` and `delta` refuse them.

    Messages without pictures have the same ids from either method, so an agent that takes pictures calls these where
    the chat has them.
    """

    def picture_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> TokenArray | MediaTokens:
        """
        Return the ids of a conversation, as `Chat.prompt` does, with its pictures.

        `DataError` for a picture that cannot be used, `ConfigError` for a model that takes none.
        """

    def picture_delta(
        self, messages: Sequence[Message], last_token_id: int, *, with_tools: bool = True
    ) -> TokenArray | MediaTokens:
        """Return the ids of new messages, as `Chat.delta` does, with their pictures; errors as in `picture_prompt`."""

    def check_picture(self, picture: Picture) -> None:
        """Raise the error with which `picture_prompt` would refuse a picture."""


@runtime_checkable
class CallIdChat(Protocol):
    """A chat that shows the ids of calls. A `Chat` without these methods takes any id."""

    def takes_call_id(self, call_id: str, tool: str) -> bool:
        """Return whether the template renders a call of a tool with this id, and its result."""

    def write_call_id(self, tool: str, number: int) -> str:
        """
        Return an id in the template's own form; empty if any id will do.

        `number` counts the calls of the conversation, from 0.
        """


@runtime_checkable
class ToolWritingChat(Protocol):
    """A chat that writes tools, calls and results as the texts of messages, in the format of the run's tool parser."""

    def with_tool_format(self, tool_format: ToolFormat | None) -> Chat:
        """Return the chat with a format; `ConfigError` for None, and for a format that the tokenizer cannot write."""


@runtime_checkable
class CheckedChat(Protocol):
    """A chat that compares real conversations with its renderings of the whole."""

    def check_conversation(
        self, number: int, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> Mapping[str, float]:
        """
        Compare a conversation, if its number is one of those to compare; the first difference is logged.

        Returns:
            Metrics of the episode; nothing if the conversation was not compared.
        """
