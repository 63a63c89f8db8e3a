"""Tables and bars on a terminal, with the texts in them as `turnwise.terminal` shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from turnwise.terminal import literal


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
