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
from typing import Final

from attrs import define, field

from turnwise import Chat, Message
from turnwise.threads import in_thread
from turnwise.types import TokenArray, ToolSchema
from turnwise_gateway.calls import CallRefusedError
from turnwise_gateway.memory import run_and_give_back

MAX_INLINE_CHARS: Final = 32 * 1024
"""Texts of this size become tokens in some milliseconds."""
_SURE_CHARS: Final = 16
_SURE_TOKENS: Final = 2
"""A text whose first 16 characters for each token of the context have twice the tokens of the context never fits."""


class LongTextError(Exception):
    """A text is not there as tokens; `Rendering.prepare` makes it so."""

    def __init__(self, args: tuple[object, ...], render: Callable[[], TokenArray]) -> None:
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
    _known: list[tuple[tuple[object, ...], Callable[[], TokenArray]]] = field(factory=list, init=False)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema], num_tool_chars: int) -> TokenArray:
        """
        Return (P,) ids of a whole conversation; errors as `Chat.prompt`.

        Args:
            messages: of the conversation.
            tools: in the prompt.
            num_tool_chars: characters of the tools as JSON.

        Raises:
            LongTextError: the tokens are not there yet.
            CallRefusedError: the texts are longer than the context.
        """
        args = ("prompt", messages, tools)
        return self._find(args, num_tool_chars, messages, partial(self.chat.prompt, messages, tools))

    def delta(self, messages: Sequence[Message], last_token_id: int, *, with_tools: bool) -> TokenArray:
        """Return (D,) ids of new messages; errors as `Chat.delta` and `prompt`."""
        args = ("delta", messages, last_token_id, with_tools)
        return self._find(args, 0, messages, partial(self.chat.delta, messages, last_token_id, with_tools=with_tools))

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
        render: Callable[[], TokenArray],
    ) -> TokenArray:
        for known, result in self._known:
            if known == args:  # in most cases the messages are the same objects
                return result()
        if num_chars + sum(map(_count_chars, messages)) <= MAX_INLINE_CHARS:
            return render()
        raise LongTextError(args, partial(self._render_long, messages, render))

    def _render_long(self, messages: Sequence[Message], render: Callable[[], TokenArray]) -> TokenArray:
        # Templates drop the reasoning of earlier turns, and no other text.
        texts = [str(message.get("content") or "") for message in messages if message["role"] != "assistant"]
        num_chars = _SURE_CHARS * self.max_tokens
        if sum(map(len, texts)) > num_chars:
            num_tokens = len(self.chat.tokenizer.encode("".join(texts)[:num_chars]))
            if num_tokens > _SURE_TOKENS * self.max_tokens:
                text = f"the conversation has more than {num_tokens} tokens of at most {self.max_tokens}"
                raise CallRefusedError(
                    "context_length_exceeded", text, num_tokens=num_tokens, max_tokens=self.max_tokens
                )
        return render()


def _count_chars(message: Message) -> int:
    calls = message.get("tool_calls") or ()
    texts = (
        message.get("content"),
        message.get("reasoning_content"),
        *(call["function"]["arguments"] for call in calls),
    )
    return sum(len(text) for text in texts if text)


def _raise(error: Exception) -> TokenArray:
    raise error


@contextmanager
def refusing_depth() -> Iterator[None]:
    """Refuse a call whose values, such as the JSON in the arguments of a call, are nested too deeply to be rendered."""
    try:
        yield
    except RecursionError as error:
        raise CallRefusedError("invalid", "a value is nested too deeply", param="messages") from error
