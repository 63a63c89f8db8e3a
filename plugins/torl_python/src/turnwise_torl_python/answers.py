r"""Finds the last `\boxed{}` of a text."""

from __future__ import annotations

import re
from typing import Final

_BRACE: Final = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def extract_last_boxed(text: str) -> str | None:
    r"""
    Return the content of the last complete `\boxed{...}` of a text, or None.

    Braces must balance, except escaped ones. The time is linear in the length of the text.
    """
    found: tuple[int, int] | None = None
    open_braces: list[int | None] = []
    for brace in _BRACE.finditer(text):
        piece = brace.group()
        if piece.endswith("{") and piece != r"\{":
            open_braces.append(brace.end() if len(piece) > 1 else None)
        elif piece == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and (found is None or start > found[0]):
                found = start, brace.start()
    return None if found is None else text[found[0] : found[1]]
