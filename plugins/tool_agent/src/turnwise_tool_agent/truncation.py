"""Truncates long responses of tools."""

from __future__ import annotations

from typing import Final, Literal

MARK: Final = "...(truncated)..."


def truncate(text: str, max_chars: int, side: Literal["left", "right", "middle"]) -> str:
    """
    Return at most `max_chars` characters of a text, with a mark in the gap.

    Args:
        text: any text.
        max_chars: at least 1; the mark is omitted where it does not fit.
        side: part to remove: `left` the beginning, `right` the end, `middle` leaves both ends.
    """
    if len(text) <= max_chars:
        return text
    mark = MARK if len(MARK) < max_chars else ""
    room = max_chars - len(mark)
    head = {"left": 0, "right": room, "middle": (room + 1) // 2}[side]
    tail = room - head
    return text[:head] + mark + text[len(text) - tail :]
