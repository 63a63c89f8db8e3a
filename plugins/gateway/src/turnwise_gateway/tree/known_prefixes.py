"""Finds the longest conversation, among the latest ones, that a request continues."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from attrs import define, field

from turnwise import Message

S = TypeVar("S")

_MAX_KNOWN: Final = 8


@define(eq=False)
class KnownPrefixes(Generic[S]):
    """
    The latest conversations of a session, each with a result of type `S`.

    Messages of a request that an earlier one had too are the same objects, so that the comparison of a long
    conversation takes some nanoseconds for each message.
    """

    _known: list[tuple[Hashable, tuple[Message, ...], S]] = field(factory=list, init=False)

    def find(self, group: Hashable, messages: tuple[Message, ...]) -> tuple[int, S] | None:
        """Return the number of messages and the result of the longest known conversation that starts the given one."""
        found = [
            (len(known), result)
            for owner, known, result in self._known
            if owner == group and messages[: len(known)] == known
        ]
        return max(found, key=lambda each: each[0], default=None)

    def keep(self, group: Hashable, messages: tuple[Message, ...], result: S) -> None:
        """Remember a conversation in the place of the ones that it continues."""
        others = [
            (owner, known, old)
            for owner, known, old in self._known
            if owner != group or messages[: len(known)] != known
        ]
        self._known = [(group, messages, result), *others][:_MAX_KNOWN]

    def clear(self) -> None:
        """Forget all conversations."""
        self._known.clear()
