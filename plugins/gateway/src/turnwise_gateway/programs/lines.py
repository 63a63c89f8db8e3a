"""The lines of a program's output, as it comes in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from attrs import define, field

MAX_LINE: Final = 4096
"""Characters of a line that are kept."""


@define(eq=False)
class Lines:
    """
    Splits an output into lines; a long line is cut.

    Attributes:
        take: called with each line.
    """

    take: Callable[[str], None]
    _begun: bytes = field(default=b"", init=False)

    def feed(self, piece: bytes) -> None:
        """Hand over the lines that end in a piece."""
        *lines, begun = (self._begun + piece).split(b"\n")
        for each in lines:
            self.take(each[:MAX_LINE].decode(errors="replace").rstrip("\r"))
        self._begun = begun[:MAX_LINE]

    def end(self) -> None:
        """Hand over a last line without an end."""
        begun, self._begun = self._begun, b""
        if begun:
            self.take(begun.decode(errors="replace"))
