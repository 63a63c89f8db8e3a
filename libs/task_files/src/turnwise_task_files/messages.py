"""The messages of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from turnwise.errors import DataError
from turnwise.types import JsonDict, Message
from turnwise_task_files.pictures import read_part

ROLES: Final = ("system", "user", "assistant", "tool", "developer")
"""The allowed roles of a message."""


_SHARE_GPT_ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles by the names of ShareGPT and its followers; those with our names stay."""


def kind_of(value: object) -> str:
    """Return the name of a value's type for error texts."""
    return "null" if value is None else type(value).__name__


def take_messages(values: JsonDict, where: str, folder: Path | None = None) -> tuple[Message, ...]:
    """Remove the messages from the columns of a row and return them; a `DataError` starts with `where`."""
    messages, column = values.pop("messages", None), "messages"
    if messages is None:
        messages, column = values.pop("prompt", None), "prompt"
    if messages is None and isinstance(values.get("conversations"), list):  # of ShareGPT
        messages, column = values.pop("conversations"), "conversations"
    if messages is None:
        hint = "data.columns.prompt=NAME reads the prompt from another column"
        raise DataError(f"{where}: has neither 'messages' nor 'prompt'; {hint}")
    if messages in ("", []):
        raise DataError(f"{where}: {column} is empty")
    if isinstance(messages, str) and column == "prompt":
        return ({"role": "user", "content": messages},)
    if not isinstance(messages, list):
        raise DataError(f"{where}: {column}: expected a list of {{role, content}}, got {kind_of(messages)}")
    return tuple(_message(message, f"{where}: {column}[{index}]", folder) for index, message in enumerate(messages))


def _message(message: object, where: str, folder: Path | None) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{where}: expected {{role, content}}, got {kind_of(message)}")
    message = _from_share_gpt(message, where)
    role, content = message.get("role"), message.get("content")
    if message.get("function_call") is not None or role == "function":
        raise DataError(
            f"{where}: function_call and the role function are an older form; use tool_calls and the role tool"
        )
    if role not in ROLES:
        raise DataError(f"{where}.role: {role!r:.60} is none of {', '.join(ROLES)}")
    # Parquet gives every message the keys of all: those without a value were never there.
    kept = {name: value for name, value in message.items() if value is not None}
    calls = kept.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{where}.tool_calls: expected a list of objects, got {kind_of(calls)}")
    if isinstance(content, str):
        return kept
    if content is None and role == "assistant" and kept.get("tool_calls"):
        return {**kept, "content": None}
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("type"), str) for p in content):
        parts = [{k: v for k, v in part.items() if v is not None} for part in content]
        places = [f"{where}.content[{index}]" for index in range(len(parts))]
        return {**kept, "content": [read_part(each, at, folder) for each, at in zip(parts, places, strict=True)]}
    raise DataError(f"{where}.content: expected a text or a list of typed parts, got {kind_of(content)}")


def _from_share_gpt(message: JsonDict, where: str) -> JsonDict:
    """Return a message of `from` and `value` as one of `role` and `content`, and any other as it is."""
    sender = message.get("from")
    if sender is None:
        return message
    if message.get("role") is not None or message.get("content") is not None:
        raise DataError(f"{where}: has both {{role, content}} and {{from, value}}; remove one form")
    if sender == "function_call":
        raise DataError(f"{where}: function_call is an older form; use {{role, content, tool_calls}}")
    role = _SHARE_GPT_ROLES.get(sender, sender) if isinstance(sender, str) else sender
    rest = {name: value for name, value in message.items() if name not in ("from", "value", "role", "content")}
    return {**rest, "role": role, "content": message.get("value")}
