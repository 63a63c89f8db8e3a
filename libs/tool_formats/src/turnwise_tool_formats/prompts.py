"""Renders probe conversations, which show how a chat template starts a turn of the model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from turnwise import Chat, Message
from turnwise.errors import TemplateError
from turnwise.types import ToolSchema

TOOL: Final[ToolSchema] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "A word."}},
            "required": ["word"],
        },
    },
}
QUESTION: Final[Message] = {"role": "user", "content": "Say a word."}


def render(chat: Chat, messages: list[Message], tools: Sequence[ToolSchema] = (TOOL,)) -> str:
    """Return the text of a conversation, without tools if the template shows none; nothing when it refuses that too."""
    for shown in (tools, ()) if tools else ((),):
        with suppress(TemplateError):
            return chat.tokenizer.decode(chat.prompt(messages, shown))
    return ""


def opens_reasoning(chat: Chat, open_tag: str, close_tag: str) -> bool:
    """Return whether a prompt opens reasoning after the user's message, so that a turn starts inside it."""
    if not open_tag:
        return False
    prompt = render(chat, [QUESTION])
    start = prompt.rpartition(str(QUESTION["content"]))[2]
    return start.rfind(open_tag) > start.rfind(close_tag)
