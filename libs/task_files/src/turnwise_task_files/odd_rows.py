"""Warnings about rows that are read, though their writer may have meant something else; one warning for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from turnwise.types import Message

_Messages = Sequence[Message]


def warn_of_odd_rows(rows: Sequence[tuple[str, _Messages, Sequence[str]]]) -> None:
    """
    Log a warning for each kind of odd row of a file, with the number of such rows and the first of them.

    Args:
        rows: in the order of the file, the place of each, its messages, and its columns that lack a number.
    """
    for text, is_odd in _KINDS.items():
        found = [where for where, messages, _columns in rows if is_odd(messages)]
        if found:
            structlog.get_logger().warning(text, rows=len(found), of=len(rows), first=found[0])
    if found := [where for where, _messages, columns in rows if columns]:
        names = dict.fromkeys(name for _where, _messages, columns in rows for name in columns)
        structlog.get_logger().warning(
            "numbers that are NaN or infinite are read as null",
            columns=", ".join(names),
            rows=len(found),
            of=len(rows),
            first=found[0],
        )


def _ends_with_answer(messages: _Messages) -> bool:
    return bool(messages[-1]["role"] == "assistant")


def _has_only_system(messages: _Messages) -> bool:
    return all(message["role"] in ("system", "developer") for message in messages)


def _has_empty_content(messages: _Messages) -> bool:
    return any(_is_empty(message["content"]) for message in messages if message["role"] not in ("assistant", "tool"))


def _is_empty(content: object) -> bool:
    if isinstance(content, str):
        return not content.strip()
    parts = content if isinstance(content, Sequence) else ()
    return all(part.get("type") == "text" and not str(part.get("text", "")).strip() for part in parts)


_KINDS: Final[Mapping[str, Callable[[_Messages], bool]]] = {
    "prompts end with an assistant message, behind which the model continues; if it is the answer of a conversation for"
    " fine-tuning, remove it from the rows": _ends_with_answer,
    "prompts have no message but a system message; a question belongs into a user message": _has_only_system,
    "prompts have a message without content": _has_empty_content,
}
