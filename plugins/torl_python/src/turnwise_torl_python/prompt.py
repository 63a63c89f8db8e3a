"""Encodes prompts, with ToRL's plain text around the question or with the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from turnwise import Chat, Message
from turnwise.errors import DataError
from turnwise.protocols import PictureChat
from turnwise.types import MediaTokens, TokenArray
from turnwise_torl_python.config import QUESTION_PLACEHOLDER, TorlPythonConfig


def encode_prompt(messages: Sequence[Message], config: TorlPythonConfig, chat: Chat) -> TokenArray | MediaTokens:
    """
    Return (P,) int32 ids of a prompt; with the template `chat`, it may have pictures.

    Raises:
        DataError: the template is `torl`, but the conversation is not one user message of text; or a message spells a
            special token and the run refuses them.
    """
    if config.template == "chat":
        return chat.picture_prompt(messages) if isinstance(chat, PictureChat) else chat.prompt(messages)
    text = config.plain_prompt.replace(QUESTION_PLACEHOLDER, chat.guard(extract_question(messages)))
    return np.array(chat.tokenizer.encode(text), np.int32)


def extract_question(messages: Sequence[Message]) -> str:
    """Return the text of a conversation that is one user message; `DataError` for any other."""
    if [message.get("role") for message in messages] != ["user"]:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise DataError(f"the plain prompt expects one user message, got {roles}; set agent.template: chat")
    return _content_text(messages[0].get("content"))


def _content_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise DataError("the plain prompt expects text, but the user message has other parts; set agent.template: chat")
    return "".join(part["text"] for part in parts)
