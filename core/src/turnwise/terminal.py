"""
The way of texts to a terminal.

A text of a model, a tool, a plugin or a file may contain control characters, which move the cursor, set the title of
the window or hide other text. Commands print through this module alone, which shows such characters as escapes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

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


class Console(RichConsole):
    """
    A console that shows control characters as escapes in whatever it prints, in tables and bars too.

    Markup in a text stays text unless `markup=True` says otherwise.
    """

    def __init__(self, *, markup: bool = False, emoji: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, emoji=emoji, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # The console's own movements of the cursor are control segments; its colours are styles.
            yield segment if segment.is_control else segment._replace(text=literal(segment.text))
