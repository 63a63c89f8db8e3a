"""
The tokens of the messages of one call: short texts at once, and long ones in a thread.

A session looks for the place of a call and writes to it without a wait in between. So a long text is not awaited there:
the lookup ends with `LongTextError`, the text becomes tokens in a thread, and the lookup starts again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, Literal

from attrs import define, field

from turnwise import Chat, Message
from turnwise.errors import DataError, TemplateError
from turnwise.protocols import PictureChat
from turnwise.threads import in_thread
from turnwise.types import ToolSchema
from turnwise_gateway.calls import CallRefusedError, ModelCall
from turnwise_gateway.contents import has_parts, text_of
from turnwise_gateway.memory import run_and_give_back
from turnwise_gateway.session.contexts import Context

MAX_INLINE_CHARS: Final = 32 * 1024
"""Texts of this size become tokens in some milliseconds."""
_SURE_CHARS: Final = 16
_SURE_TOKENS: Final = 2
"""A text whose first 16 characters for each token of the context have twice the tokens of the context never fits."""


class LongTextError(Exception):
    """A text is not there as tokens; `Rendering.prepare` makes it so."""

    def __init__(self, args: tuple[object, ...], render: Callable[[], Context]) -> None:
        super().__init__("a long text is not there as tokens")
        self.key, self.render = args, render


@define(eq=False)
class Rendering:
    """
    The tokens of a call.

    Attributes:
        chat: renders and tokenizes.
        max_tokens: of the context.
        turn: held while a long text is tokenized, so that a session has one thread for that at most.
    """

    chat: Chat
    max_tokens: int
    turn: asyncio.Lock
    _known: list[tuple[tuple[object, ...], Callable[[], Context]]] = field(factory=list, init=False)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema], num_tool_chars: int) -> Context:
        """
        Return (P,) ids of a whole conversation.

        Args:
            messages: of the conversation.
            tools: in the prompt.
            num_tool_chars: characters of the tools as JSON.

        Raises:
            LongTextError: the tokens are not there yet.
            CallRefusedError: the texts are longer than the context, or the chat refuses what a message has.
            TemplateError: as `Chat.prompt`.
        """
        args = ("prompt", messages, tools)
        render = self._choose(messages, "prompt")
        return self._find(args, num_tool_chars, messages, partial(render, messages, tools))

    def delta(self, messages: Sequence[Message], last_token_id: int, *, with_tools: bool) -> Context:
        """Return (D,) ids of new messages; errors as `prompt`, and `TemplateError` as `Chat.delta`."""
        args = ("delta", messages, last_token_id, with_tools)
        render = self._choose(messages, "delta")
        return self._find(args, 0, messages, partial(render, messages, last_token_id, with_tools=with_tools))

    def _choose(self, messages: Sequence[Message], name: Literal["prompt", "delta"]) -> Callable[..., Context]:
        """Return the method of the chat that renders messages; only sessions whose chat has it take pictures."""
        if isinstance(self.chat, PictureChat) and any(map(has_parts, messages)):
            return self.chat.picture_prompt if name == "prompt" else self.chat.picture_delta
        return self.chat.prompt if name == "prompt" else self.chat.delta

    async def prepare(self, missing: LongTextError) -> None:
        """Make tokens of a text in a thread, beside other calls."""
        try:
            async with self.turn:
                ids = await in_thread(run_and_give_back, {"work": missing.render})
        except Exception as error:  # noqa: BLE001 - raised by the lookup, as for a short text
            self._known.append((missing.key, partial(_raise, error)))
        else:
            self._known.append((missing.key, lambda: ids))

    def _find(
        self,
        args: tuple[object, ...],
        num_chars: int,
        messages: Sequence[Message],
        render: Callable[[], Context],
    ) -> Context:
        for known, result in self._known:
            if known == args:  # in most cases the messages are the same objects
                with _refusing_data():
                    return result()
        if num_chars + sum(map(_count_chars, messages)) <= MAX_INLINE_CHARS:
            with _refusing_data():
                return render()
        raise LongTextError(args, partial(self._render_long, messages, render))

    def _render_long(self, messages: Sequence[Message], render: Callable[[], Context]) -> Context:
        # Templates drop the reasoning of earlier turns, and no other text.
        texts = [text_of(message.get("content")) for message in messages if message["role"] != "assistant"]
        num_chars = _SURE_CHARS * self.max_tokens
        if sum(map(len, texts)) > num_chars:
            num_tokens = len(self.chat.tokenizer.encode("".join(texts)[:num_chars]))
            if num_tokens > _SURE_TOKENS * self.max_tokens:
                text = f"the conversation has more than {num_tokens} tokens of at most {self.max_tokens}"
                raise CallRefusedError(
                    "context_length_exceeded", text, num_tokens=num_tokens, max_tokens=self.max_tokens
                )
        return render()


def render_prompt(call: ModelCall, tools: str, rendering: Rendering) -> Context:
    """Return the ids of a call's conversation; `CallRefusedError` if the template refuses it."""
    try:
        return rendering.prompt(call.messages, call.tools, len(tools))
    except TemplateError as error:
        raise _refuse(error) from error


@contextmanager
def _refusing_data() -> Iterator[None]:
    """Refuse a call for what a message has, such as a special token or a picture that the chat does not take."""
    # No other rendering of the conversation would show the message, so none is tried, as after a `TemplateError`.
    try:
        yield
    except DataError as error:
        raise _refuse(error) from error


def _refuse(error: Exception) -> CallRefusedError:
    return CallRefusedError("invalid", " ".join(str(error).split()), param="messages")


def _count_chars(message: Message) -> int:
    calls = message.get("tool_calls") or ()
    if has_parts(message):  # to read a picture takes as long as a long text
        return MAX_INLINE_CHARS + 1
    texts = (
        message.get("content"),
        message.get("reasoning_content"),
        *(call["function"]["arguments"] for call in calls),
    )
    return sum(len(text) for text in texts if text)


def _raise(error: Exception) -> Context:
    raise error


@contextmanager
def refusing_depth() -> Iterator[None]:
    """Refuse a call whose values, such as the JSON in the arguments of a call, are nested too deeply to be rendered."""
    try:
        yield
    except RecursionError as error:
        raise CallRefusedError("invalid", "a value is nested too deeply", param="messages") from error
