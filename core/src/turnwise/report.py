"""Texts about an episode for people: what a tool did, or what a reward found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import evolve, field, frozen

MAX_CHARACTERS: Final = 65_536
"""Characters that a result keeps of a text; the start and the end are kept."""
MAX_REPORTS: Final = 1_000
"""Reports that a result keeps; the metric `reports_left_out` counts the others."""


@frozen(kw_only=True)
class Report:
    """
    A text about an episode, such as a command with its output, or the output of tests. The model reads none.

    Attributes:
        title: of one line or a few, such as the command.
        text: the rest, at most `MAX_CHARACTERS` characters in a result.
        facts: short texts and numbers by name, such as an exit code or seconds.
        failed: whether the command or the test of the report failed.
        num_turns: turns of the model before it; the episode sets it.
    """

    title: str
    text: str = ""
    facts: Mapping[str, str | float] = field(factory=dict)
    failed: bool = False
    num_turns: int = 0

    def placed(self, num_turns: int) -> Report:
        """Return the report as a result keeps it: with its place, and with texts that are not too long."""
        title, text = shorten_middle(self.title), shorten_middle(self.text)
        return evolve(self, title=title, text=text, num_turns=num_turns)


def shorten_middle(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return a text of at most `most` characters, or its start and its end, and the number of the others."""
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}\n… {len(text) - most:,} characters more …\n{text[head - most :]}"
