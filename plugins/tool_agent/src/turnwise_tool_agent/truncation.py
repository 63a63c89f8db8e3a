"""Truncates long responses of tools."""

from __future__ import annotations

from typing import Final, Literal

from turnwise import ToolResult
from turnwise.showing import cut_text

MARK: Final = "...(truncated)..."


def truncate(result: ToolResult, max_chars: int, side: Literal["left", "right", "middle"]) -> ToolResult:
    """
    Return a result with at most `max_chars` characters of its text, a mark in the gap, and all of its pictures.

    Args:
        result: of any tool.
        max_chars: at least 1; the mark is omitted where it does not fit.
        side: part to remove: `left` the beginning, `right` the end, `middle` leaves both ends.
    """
    if len(result.text) <= max_chars:
        return result
    mark = MARK if len(MARK) < max_chars else ""
    room = max_chars - len(mark)
    head = {"left": 0, "right": room, "middle": (room + 1) // 2}[side]
    return cut_text(result, head, room - head, mark)
