"""
Reads a turn while it is sampled, as far as the text of its reply is decided.

A part that may still become something else is held back: half a character, the start of a stop string, of a tool call
or of a tag of reasoning. So the reply of the whole turn begins with each earlier part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from attrs import define, field

from turnwise import Chat, ToolParser
from turnwise_gateway.calls import ModelReply, PartialReply

Settle = Callable[[str], tuple[str, str]]
"""Returns how the reasoning and the rest of an unfinished text begin, however the text continues."""
_HALF: Final = "\ufffd"
"""Tokenizers write it for the bytes of a character that has not ended."""


class SettlingParser(Protocol):
    """A tool parser that reports the decided part of an unfinished turn."""

    def settled(self, text: str) -> int:
        """Return how many characters of an unfinished turn begin its content, however the turn continues."""


def find_settling_parser(parser: ToolParser | None) -> SettlingParser | None:
    """Return the parser if its class reports the decided part of a turn."""
    # A method of the class: a wrapper, which may change turns, only forwards that of the parser inside.
    return cast(SettlingParser, parser) if callable(getattr(type(parser), "settled", None)) else None


@define(eq=False)
class GrowingText:
    """
    The text of ids that arrive in parts.

    Attributes:
        chat: decodes the ids.
        text: of the ids so far, without half a character and without an end-of-turn token at the end.
    """

    chat: Chat
    text: str = ""
    _ids: list[int] = field(factory=list)
    _window: tuple[int, int] = (0, 0)  # the ids before the second index are in the text

    def add(self, token_ids: Sequence[int]) -> None:
        """Add ids at the end."""
        self._ids.extend(token_ids)

    def update(self) -> str:
        """Decode the new ids, and return the text."""
        first, last = self._window
        end = len(self._ids)
        while end > last and self._ids[end - 1] in self.chat.stop_token_ids:
            end -= 1
        # With the ids of the last part before the new ones: alone, a token may have another text, such as no space.
        decode = self.chat.tokenizer.decode
        known, text = decode(self._ids[first:last]), decode(self._ids[first:end])
        if len(text) > len(known) and not text.endswith(_HALF):
            self.text += text[len(known) :]
            self._window = (last, end)
        return self.text


@define(eq=False)
class TurnDraft:
    """
    A turn that is being sampled.

    Attributes:
        text: of the turn.
        parser: of its calls; None if it has none.
        settle: splits its reasoning; None if it has none.
        stops: strings that may end it.
    """

    text: GrowingText
    parser: SettlingParser | None = None
    settle: Settle | None = None
    stops: Sequence[str] = ()

    def read(self) -> tuple[str, str]:
        """Return how the reasoning and the content of the turn begin."""
        text = self.text.update()
        if self.parser is not None:
            text = text[: self.parser.settled(text)]
        reasoning, content = ("", text) if self.settle is None else self.settle(text)
        for stop in self.stops:
            content = _before_stop(content, stop)
        return reasoning, content


def stream_reply(
    partial_reply: PartialReply, draft: TurnDraft, build: Callable[[str, str], ModelReply]
) -> Callable[[Sequence[int]], None]:
    """
    Let a stream read a turn while it is sampled.

    Args:
        partial_reply: of the call.
        draft: of the turn.
        build: returns the reply with a reasoning and a content.

    Returns:
        The listener of the engine's request.
    """

    def read() -> ModelReply | None:
        reasoning, content = draft.read()
        return build(reasoning, content) if reasoning or content else None

    def listen(token_ids: Sequence[int]) -> None:
        draft.text.add(token_ids)
        partial_reply.changed.set()

    partial_reply.read = read
    return listen


def _before_stop(text: str, stop: str) -> str:
    """Return a text up to a stop string, or up to an end that may become one."""
    if (found := text.find(stop)) >= 0:
        return text[:found]
    size = next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
    return text[: len(text) - size]
