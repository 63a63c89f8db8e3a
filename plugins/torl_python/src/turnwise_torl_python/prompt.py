"""Prompts: ToRL's plain text around the question, or the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise import Chat, Message
from turnwise.errors import DataError
from turnwise.types import TokenArray
from turnwise_torl_python.config import QUESTION_MARK, TorlPythonConfig


def prompt_ids(messages: Sequence[Message], config: TorlPythonConfig, chat: Chat) -> TokenArray:
    """
    Return (P,) int32 ids of a prompt.

    Raises:
        DataError: the plain prompt is asked for, and the conversation is not one user message of text.
    """
    if config.template == "chat":
        return chat.prompt(messages)
    text = config.plain_prompt.replace(QUESTION_MARK, question_of(messages))
    return np.array(chat.tokenizer.encode(text), np.int32)


def question_of(messages: Sequence[Message]) -> str:
    """Return the text of a conversation that is one user message; `DataError` for any other."""
    if [message.get("role") for message in messages] != ["user"]:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise DataError(f"the plain prompt takes one user message, got {roles}; set agent.template: chat")
    return _content_text(messages[0].get("content"))


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise DataError("the plain prompt takes text, and the user message holds something else")
    return "".join(part["text"] for part in parts)
