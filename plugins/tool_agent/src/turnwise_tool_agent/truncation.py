"""Cuts long answers of tools."""

from __future__ import annotations

from typing import Final, Literal

MARK: Final = "...(truncated)..."


def truncated(text: str, max_chars: int, kept: Literal["left", "right", "middle"]) -> str:
    """
    Return at most `max_chars` characters of a text, with a mark where something is missing.

    Args:
        text: any text.
        max_chars: at least 1; where the mark itself does not fit, there is none.
        kept: `left` keeps the beginning, `right` the end, `middle` both.
    """
    if len(text) <= max_chars:
        return text
    mark = MARK if len(MARK) < max_chars else ""
    room = max_chars - len(mark)
    head = {"left": room, "right": 0, "middle": (room + 1) // 2}[kept]
    tail = room - head
    return text[:head] + mark + text[len(text) - tail :]
