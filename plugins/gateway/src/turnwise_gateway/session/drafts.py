"""
Reads a turn while it is sampled, as far as the text of its reply is decided.

A part that may still become something else is held back: half a character, the start of a stop string, of a tool call
or of a tag of reasoning. So the reply of the whole turn begins with each earlier part. Where a malformed call is text,
the first call holds back the rest of the turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, cast

from attrs import define, field

from turnwise import Chat, ToolParser
from turnwise.messages import CallSoFar, TurnSoFar
from turnwise.protocols import StreamingParser, TurnStream
from turnwise.types import ToolSchema
from turnwise_gateway.calls import CallOfTool, ModelReply, PartialReply
from turnwise_gateway.session.call_ids import NameCall
from turnwise_gateway.session.texts import Arranged, Split, arrange, build_calls

Settle = Callable[[str], tuple[str, str]]
"""Returns how the reasoning and the rest of an unfinished text begin, however the text continues."""
_HALF: Final = "\ufffd"
"""Tokenizers write it for the bytes of a character that has not ended."""


class SettlingParser(Protocol):
    """A tool parser that reports the decided part of an unfinished turn, but not its calls."""

    def settled(self, text: str) -> int:
        """Return how many characters of an unfinished turn begin its content, however the turn continues."""


@define(eq=False)
class _SettledText:
    """The `TurnStream` of a parser that only reports the decided part of a turn, or of no parser."""

    parser: SettlingParser | None

    def read(self, text: str, *, is_whole: bool = False) -> TurnSoFar:
        return TurnSoFar(texts=(text if self.parser is None else text[: self.parser.settled(text)],))


def find_streaming_parser(parser: ToolParser | None) -> StreamingParser | None:
    """Return the parser if its class reads the calls of a turn while it is sampled."""
    # A method of the class: a wrapper, which may change turns, only forwards that of the parser inside.
    return cast(StreamingParser, parser) if callable(getattr(type(parser), "follow", None)) else None


def find_stream(parser: ToolParser | None, tools: Sequence[ToolSchema]) -> TurnStream | None:
    """Return the reader of a turn that is being sampled; None if the parser has no method for it."""
    if parser is None:
        return _SettledText(None)
    if (streaming := find_streaming_parser(parser)) is not None:
        return streaming.follow(tools)
    return _SettledText(cast(SettlingParser, parser)) if callable(getattr(type(parser), "settled", None)) else None


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
        stream: reads its calls.
        split: splits the reasoning from a text that is whole; None if the turn has none.
        settle: the same for a text that may grow.
        stops: strings that may end the turn.
        shows_calls: calls are shown before the end of the turn.
    """

    text: GrowingText
    stream: TurnStream
    split: Split | None = None
    settle: Settle | None = None
    stops: Sequence[str] = ()
    shows_calls: bool = False
    _closed: tuple[int, Arranged] = field(default=(-1, Arranged("", "")), init=False)

    def read(self) -> tuple[Arranged, Sequence[CallSoFar]]:
        """Return how the texts of the turn begin, and how its calls do."""
        turn = self.stream.read(self.text.update())
        if not (turn.calls and self.shows_calls):
            return self._settle(Arranged("", ""), turn.texts[0]), ()
        if self._closed[0] != len(turn.calls):  # so that a long text is not split again for each part of a call
            self._closed = len(turn.calls), arrange(turn.texts[:-1], self.split)
        return self._settle(self._closed[1].begin_text(), turn.texts[-1]), turn.calls

    def _settle(self, before: Arranged, text: str) -> Arranged:
        reasoning, content = ("", text) if self.settle is None else self.settle(text)
        for stop in self.stops:
            content = _before_stop(content, stop)
        return before.add(reasoning, content)


def stream_reply(
    partial_replies: Sequence[PartialReply],
    draft: TurnDraft,
    name_call: NameCall,
    build: Callable[[str, str, tuple[CallOfTool, ...]], ModelReply],
) -> Callable[[Sequence[int]], None]:
    """
    Let streams read a turn while it is sampled.

    Args:
        partial_replies: of the requests that wait for the turn; requests that join get each next part, too.
        draft: of the turn.
        name_call: returns the id of a call.
        build: returns the reply with a reasoning, a content and calls.

    Returns:
        The listener of the engine's request.
    """

    def read() -> ModelReply | None:
        texts, calls = draft.read()
        named = build_calls(calls, texts.places, name_call)
        return build(texts.reasoning, texts.content, named) if texts.reasoning or texts.content or named else None

    def listen(token_ids: Sequence[int]) -> None:
        draft.text.add(token_ids)
        for partial_reply in partial_replies:
            partial_reply.read = read
            partial_reply.changed.set()

    return listen


def _before_stop(text: str, stop: str) -> str:
    """Return a text up to a stop string, or up to an end that may become one."""
    if (found := text.find(stop)) >= 0:
        return text[:found]
    size = next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
    return text[: len(text) - size]
