"""
Extracts python blocks from the text of a model.

A block opens with ```python at the end of a line, and closes with the next ``` that no word follows. A second opening
before the closing restarts the block, because the model forgot to close the first one. A fence inside a string or a
comment belongs to the program; elsewhere Python has no backticks.
"""

from __future__ import annotations

import re
from typing import Final

_OPENING: Final = re.compile(r"```(?:python|python3|py)[ \t]*\n", re.IGNORECASE)
_PIECE: Final = re.compile(
    r"""
    (?P<closing>`{3,}(?=\s|\Z))
    | (?P<opening>```(?:python|python3|py)[ \t]*\n)
    | \#[^\n]*
    | \"{3}(?:[^\\]|\\.)*?\"{3} | '{3}(?:[^\\]|\\.)*?'{3}
    | "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*'
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
"""Fences, and the comments and strings of a program, which may contain a fence."""


def extract_python_blocks(text: str) -> list[str]:
    """Return the code of every complete python block of a text, in order."""
    blocks: list[str] = []
    opening = _OPENING.search(text)
    while opening is not None:
        end, code = _read_block(text, opening.end())
        if code is not None:
            blocks.append(code)
        opening = _OPENING.search(text, end)
    return blocks


def extract_last_python_block(text: str) -> str | None:
    """Return the code of the last complete python block of a text, or None."""
    blocks = extract_python_blocks(text)
    return blocks[-1] if blocks else None


def _read_block(text: str, start: int) -> tuple[int, str | None]:
    """Return the end of the block that starts at `start`, and its code; None if the block is not closed."""
    for piece in _PIECE.finditer(text, start):
        if piece["closing"] is not None:
            return piece.end(), text[start : piece.start()]
        if piece["opening"] is not None:
            start = piece.end()
    return len(text), None
