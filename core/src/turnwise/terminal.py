"""
The way of texts to a terminal.

A text of a model, a tool, a plugin or a file may contain control characters, which move the cursor, set the title of
the window or hide other text. Commands print through this module and
`turnwise.console` alone, which show such characters as escapes.
"""

from __future__ import annotations

import re
import sys
from typing import Final

# C0 and C1 controls but tab and newline, soft hyphen, marks that are not seen or turn the direction of writing, line
# and paragraph separators, tags, and halves of surrogate pairs.
_HARMFUL: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


def literal(text: str) -> str:
    """
    Return a text with control characters and invisible characters as escapes; tabs and newlines stay.

    JSON in ASCII stays JSON with the same values.
    """
    return _HARMFUL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    # Of the characters of JSON in ASCII only this one is harmful, and JSON does not know its usual escape.
    return "\\u007f" if found[0] == "\x7f" else found[0].encode("unicode_escape").decode()


def one_line(text: str) -> str:
    """Return a text as `literal` does, with tabs and newlines as escapes too."""
    return literal(text).replace("\n", "\\n").replace("\t", "\\t")


def write_output(text: str) -> None:
    """Write a text to standard output, as `literal` shows it."""
    sys.stdout.write(literal(text))


def write_error(text: str) -> None:
    """Write a text to standard error, as `literal` shows it."""
    sys.stderr.write(literal(text))
