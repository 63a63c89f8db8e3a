r"""
A base class for chats of a family of models: Python writes the messages, and no template needs a proof.

A subclass writes one message as text. What it writes depends on that message alone, so a conversation only grows::

    class ChatMl(FamilyChat):
        turn_end = "<|im_end|>"
        turn_start = "<|im_start|>assistant\n"

        def write(self, message):
            return f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"

A class whose special tokens are in `turn_start` and around contents alone needs no more. Contents arrive guarded: their
own special tokens are already treated by the policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from turnwise.errors import ConfigError, TemplateError
from turnwise.options import SpecialTokenPolicy
from turnwise.protocols import ModelSpec
from turnwise.types import Message, TokenArray, ToolSchema
from turnwise_chat_templates.contents import ContentGuard
from turnwise_chat_templates.loading import load_tokenizer
from turnwise_chat_templates.render import HuggingFaceTokenizer


class FamilyChat(ABC):
    """
    A chat whose messages are written by Python.

    Args:
        tokenizer: any tokenizer of transformers.
        special_tokens: treatment of special tokens that messages spell.

    Attributes:
        turn_end: the special token that ends a turn of the model.
        turn_start: text from which the model continues.
        between: text between the end of a turn and the next message.

    Raises:
        ConfigError: the tokenizer has no single id for `turn_end`.
    """

    turn_end: ClassVar[str]
    turn_start: ClassVar[str]
    between: ClassVar[str] = ""

    def __init__(self, tokenizer: Any, *, special_tokens: SpecialTokenPolicy = "text") -> None:
        self._tokenizer = HuggingFaceTokenizer(tokenizer)
        self._contents = ContentGuard(self._tokenizer.special_tokens, special_tokens)
        ends = self._tokenizer.encode(self.turn_end)
        if len(ends) != 1:
            raise ConfigError(
                f"the tokenizer has no token {self.turn_end!r}, with which a turn of {type(self).__name__} ends"
            )
        self._stops = tuple(dict.fromkeys(each for each in (*ends, self._tokenizer.eos_token_id) if each is not None))

    @classmethod
    def load(cls, spec: ModelSpec, special_tokens: SpecialTokenPolicy = "text") -> FamilyChat:
        """Return the chat with the tokenizer of a model's directory; errors as in `load_tokenizer`."""
        return cls(load_tokenizer(spec), special_tokens=special_tokens)

    @abstractmethod
    def write(self, message: Mapping[str, Any]) -> str:
        """Return a message as text; `TemplateError` for one that the family cannot show."""

    def write_tools(self, tools: Sequence[ToolSchema]) -> str:
        """Return the text before the first message; a family without tools refuses them."""
        if tools:
            raise TemplateError(f"{type(self).__name__} shows no tools")
        return ""

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
        return self._encode(self.write_tools(tools) + self._write_all(messages))

    def delta(self, messages: Sequence[Message], last_token_id: int, *, with_tools: bool = True) -> TokenArray:
        del with_tools  # tools are before the first message
        end = "" if last_token_id in self._stops else self.turn_end
        return self._encode(end + self.between + self._write_all(messages))

    def text(self, token_ids: Sequence[int] | TokenArray) -> str:
        end = len(token_ids)
        while end and token_ids[end - 1] in self._stops:
            end -= 1
        return self._tokenizer.decode(token_ids[:end])

    def _write_all(self, messages: Sequence[Message]) -> str:
        return "".join(self.write(self._contents.value(message)) for message in messages) + self.turn_start

    def _encode(self, text: str) -> TokenArray:
        return np.array(self._tokenizer.encode(text), np.int32)
