"""
Finds python blocks in what the model wrote.

A block opens with ```python at the end of a line, and closes with the next ``` that has no word behind it. A second
opening before the closing begins the block anew: the model forgot to close the first. A fence inside a string or a
comment of the program belongs to the program; outside of them Python has no backticks.
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
"""What of a program must be read as one: fences, and the comments and strings that may hold what looks like one."""


def python_blocks(text: str) -> list[str]:
    """Return the code of every complete python block of a text, in order."""
    blocks: list[str] = []
    opening = _OPENING.search(text)
    while opening is not None:
        end, code = _block(text, opening.end())
        if code is not None:
            blocks.append(code)
        opening = _OPENING.search(text, end)
    return blocks


def last_python_block(text: str) -> str | None:
    """Return the code of the last complete python block of a text, or None."""
    blocks = python_blocks(text)
    return blocks[-1] if blocks else None


def _block(text: str, start: int) -> tuple[int, str | None]:
    """Return where the block that begins at `start` ends, and its code; None where nothing closes it."""
    for piece in _PIECE.finditer(text, start):
        if piece["closing"] is not None:
            return piece.end(), text[start : piece.start()]
        if piece["opening"] is not None:
            start = piece.end()
    return len(text), None
