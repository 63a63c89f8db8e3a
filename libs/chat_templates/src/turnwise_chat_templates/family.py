r"""
A base class for chats of a family of models: Python writes the messages, and no template needs a proof.

A subclass writes one message as text. What it writes depends on that message alone, so a conversation only grows::

    class ChatMl(FamilyChat):
        turn_end = "<|im_end|>"
        turn_start = "<|im_start|>assistant\n"

        def write(self, message):
            return f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"

A class whose special tokens are in `turn_start` and around contents alone needs no more. Contents arrive guarded: their
own special tokens are already treated by the policy. `turnwise_chat_templates.harmony` needs more: tools and the
leading message are in one text, a turn has two ends, and results of tools find their names in earlier calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import numpy as np

from turnwise.errors import ConfigError, TemplateError
from turnwise.options import SpecialTokenPolicy
from turnwise.protocols import ModelSpec
from turnwise.types import Message, TokenArray, ToolSchema
from turnwise_chat_templates.contents import ContentGuard
from turnwise_chat_templates.loading import generation_stops, load_tokenizer
from turnwise_chat_templates.render import HuggingFaceTokenizer, PromptCache
from turnwise_chat_templates.shown import name_message


@contextmanager
def naming_message(messages: Sequence[Mapping[str, object]], index: int) -> Iterator[None]:
    """Begin the text of a `TemplateError` with the place and the role of a message."""
    try:
        yield
    except TemplateError as error:
        raise TemplateError(f"{name_message(messages, index)}: {error}") from error


class FamilyChat(ABC):
    """
    A chat whose messages are written by Python.

    Args:
        tokenizer: any tokenizer of transformers.
        special_tokens: treatment of special tokens that messages spell.

    Attributes:
        turn_end: the special token that ends a turn of the model.
        more_turn_ends: other special tokens that end one.
        turn_start: text from which the model continues.
        between: text between the end of a turn and the next message.

    Raises:
        ConfigError: the tokenizer has no token that ends a turn.
    """

    turn_end: ClassVar[str]
    more_turn_ends: ClassVar[tuple[str, ...]] = ()
    turn_start: ClassVar[str]
    between: ClassVar[str] = ""

    def __init__(self, tokenizer: Any, *, special_tokens: SpecialTokenPolicy = "text") -> None:
        self._tokenizer = HuggingFaceTokenizer(tokenizer)
        self._contents = ContentGuard(self._tokenizer.special_tokens, special_tokens)
        self._prompts = PromptCache(self._tokenizer)
        self._stops: tuple[int, ...] = ()
        self._add_stops([*map(self.find_special, (self.turn_end, *self.more_turn_ends)), self._tokenizer.eos_token_id])

    @classmethod
    def load(cls, spec: ModelSpec, special_tokens: SpecialTokenPolicy = "text", **options: object) -> Self:
        """
        Return the chat with the tokenizer of a model's directory; the model's generation config may name more ends.

        Args:
            spec: the model.
            special_tokens: treatment of special tokens that messages spell.
            options: further arguments of the class.

        Raises:
            ConfigError: as in `load_tokenizer`, or the model has a template or options of one.
        """
        for key in ("chat_template", "template_options"):
            if getattr(spec, key):
                raise ConfigError(
                    f"model.{key}: {cls.__name__} has no template; remove the key or use the chat 'jinja'"
                )
        chat = cls(load_tokenizer(spec), special_tokens=special_tokens, **options)
        assert spec.path is not None
        chat._add_stops(generation_stops(spec.path))
        return chat

    @abstractmethod
    def write(self, message: Mapping[str, object]) -> str:
        """Return a message as text; `TemplateError` for one that the family cannot show."""

    def write_tools(self, tools: Sequence[ToolSchema]) -> str:
        """Return the text before the first message; a family without tools refuses them."""
        if tools:
            raise TemplateError(f"{type(self).__name__} shows no tools")
        return ""

    def write_head(self, messages: Sequence[Mapping[str, object]], tools: Sequence[ToolSchema]) -> tuple[str, int]:
        """Return the text that a prompt begins with, and the number of leading messages that this text shows."""
        del messages
        return self.write_tools(tools), 0

    def read(self, messages: Sequence[Message]) -> Sequence[Mapping[str, Any]]:
        """
        Return messages as `write` gets them, before their contents are guarded.

        A class overrides it where the text of a message depends on other messages, or on text in a JSON string, which
        may escape a special token. `TemplateError` for a message that cannot be shown.
        """
        return messages

    def close_turn(self, last_token_id: int, messages: Sequence[Mapping[str, object]]) -> str:
        """Return the text that ends a turn with this last token, in front of new messages; "" if it has its end."""
        del messages
        return "" if last_token_id in self._stops else self.turn_end

    def find_special(self, token: str) -> int:
        """Return the id of a special token; `ConfigError` if the tokenizer does not have it."""
        ids = self._tokenizer.encode(token)
        if len(ids) != 1:
            raise ConfigError(f"the tokenizer has no token {token!r}, which {type(self).__name__} needs")
        return ids[0]

    @property
    def tokenizer(self) -> HuggingFaceTokenizer:
        return self._tokenizer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stops

    def guard(self, content: str) -> str:
        return self._contents.text(content)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> TokenArray:
        if not messages:
            raise TemplateError("a prompt needs at least one message")
        shown = self._guarded(messages)
        head, num_shown = self.write_head(shown, tools)
        return self._prompts.encode(head + self._write_from(shown, num_shown))

    def delta(self, messages: Sequence[Message], last_token_id: int, *, with_tools: bool = True) -> TokenArray:
        del with_tools  # tools are before the first message
        if not messages or any(message.get("role") == "assistant" for message in messages):
            raise TemplateError("a delta takes messages of the environment, at least one; the model's are sampled")
        shown = self._guarded(messages)
        return self._encode(self.close_turn(last_token_id, shown) + self.between + self._write_from(shown, 0))

    def text(self, token_ids: Sequence[int] | TokenArray) -> str:
        end = len(token_ids)
        while end and token_ids[end - 1] in self._stops:
            end -= 1
        return self._tokenizer.decode(token_ids[:end])

    def _guarded(self, messages: Sequence[Message]) -> list[Mapping[str, Any]]:
        return [self._contents.value(message) for message in self.read(messages)]

    def _write_from(self, messages: Sequence[Mapping[str, object]], first: int) -> str:
        """Return the text of the messages from an index on, and the start of a turn."""
        texts = []
        for index in range(first, len(messages)):
            with naming_message(messages, index):
                texts.append(self.write(messages[index]))
        return "".join(texts) + self.turn_start

    def _add_stops(self, ids: Iterable[int | None]) -> None:
        self._stops = tuple(dict.fromkeys(each for each in (*self._stops, *ids) if each is not None))

    def _encode(self, text: str) -> TokenArray:
        return np.array(self._tokenizer.encode(text), np.int32)
