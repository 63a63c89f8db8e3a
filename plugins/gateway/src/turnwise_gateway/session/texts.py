"""The texts of a turn around its calls, as the client gets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from turnwise.messages import UNNAMED_CALL, CallSoFar
from turnwise_gateway.calls import CallOfTool
from turnwise_gateway.session.call_ids import NameCall

Split = Callable[[str], tuple[str, str]]
"""Returns the reasoning and the rest of a text."""


@frozen
class Arranged:
    """
    The texts of a turn.

    Attributes:
        reasoning: text of the reasoning, which is before the first call.
        content: the rest, without the white space that alone is between calls.
        places: number of characters of the content before each call.
    """

    reasoning: str
    content: str
    places: tuple[int, ...] = ()

    def begin_text(self) -> Arranged:
        """Return the texts with a call at their end."""
        return Arranged(self.reasoning, self.content, (*self.places, len(self.content)))

    def add(self, reasoning: str, content: str) -> Arranged:
        """Return the texts with one more. A client has the reasoning before a call, and gets none behind it."""
        if not self.places:
            return Arranged(reasoning, content)
        return Arranged(self.reasoning, self.content + content if content.strip() else self.content, self.places)


def arrange(texts: Sequence[str], split: Split | None, stop: str | None = None) -> Arranged:
    """
    Return the texts before, between and behind calls as a client gets them.

    Args:
        texts: all that are whole.
        split: splits the reasoning from a text; None for a turn without reasoning.
        stop: ended the turn, and the last text is cut there: the last token may reach beyond it.
    """
    found = Arranged("", "")
    for number, text in enumerate(texts):
        found = found.begin_text() if number else found
        reasoning, content = ("", text) if split is None else split(text)
        if stop is not None and number == len(texts) - 1 and stop in content:
            content = content[: content.rindex(stop)]
        found = found.add(reasoning, content)
    return found


def build_calls(
    calls: Sequence[CallSoFar], places: Sequence[int], name_call: NameCall, *, is_whole: bool = False
) -> tuple[CallOfTool, ...]:
    """Return the calls of a reply, each with its id and its place; none of a whole reply is open."""
    return tuple(
        CallOfTool(
            id=name_call(index, call),
            name=call.name or UNNAMED_CALL,
            arguments=call.arguments,
            place=place,
            is_open=not (call.is_complete or is_whole),
        )
        for index, (call, place) in enumerate(zip(calls, places, strict=True))
    )
