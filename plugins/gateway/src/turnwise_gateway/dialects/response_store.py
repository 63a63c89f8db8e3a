"""
The responses of a session, for requests that name a response or an item of one in place of sending it.

Only the session resolves the names: they are its own, and it has the turns anyway. Nothing is stored beyond its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from attrs import define, field

from turnwise import Message


@define(eq=False)
class ResponseStore:
    """The conversations that ended with a response, and the items of the responses."""

    _conversations: dict[str, tuple[Message, ...]] = field(factory=dict, init=False)
    _items: dict[str, Mapping[str, Any]] = field(factory=dict, init=False)
    _counts: Counter[str] = field(factory=Counter, init=False)

    def name_response(self, digest: str) -> str:
        """Return the id of the next response to a request with a digest; a replay of the session gives the same id."""
        self._counts[digest] += 1
        return f"resp_{blake2b(f'{digest}|{self._counts[digest]}'.encode(), digest_size=16).hexdigest()}"

    def keep(self, name: str, conversation: Sequence[Message], items: Sequence[Mapping[str, Any]]) -> None:
        """Keep a response: the messages up to its end, without instructions, and its items."""
        self._conversations[name] = tuple(conversation)
        self._items.update({item["id"]: item for item in items})

    def find_conversation(self, name: str) -> tuple[Message, ...] | None:
        """Return the messages that end with a response; None if the session has no response of this id."""
        return self._conversations.get(name)

    def find_item(self, name: str) -> Mapping[str, Any] | None:
        """Return an item of a response; None if the session has no item of this id."""
        return self._items.get(name)
