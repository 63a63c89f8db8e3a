"""The episodes that a call has still to start; more may be added while others run."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable

from attrs import define, field

from turnwise.protocols.reward import GroupKey
from turnwise.record.spec import EpisodeSpec

Numbered = tuple[int, EpisodeSpec]


@define(eq=False)
class EpisodeFeed:
    """
    Numbered episodes in the order in which they start. A list of episodes is a feed that was closed at once.

    Everything but the construction happens on the runtime's event loop.
    """

    closed: bool = False
    num_members: Counter[GroupKey] = field(factory=Counter, init=False)
    _waiting: deque[Numbered] = field(factory=deque, init=False)
    _num_added: int = field(default=0, init=False)
    _changed: asyncio.Event = field(factory=asyncio.Event, init=False)

    @classmethod
    def of(cls, specs: Iterable[EpisodeSpec]) -> EpisodeFeed:
        """Return the closed feed of some episodes."""
        feed = cls()
        feed.add(specs)
        feed.close()
        return feed

    def add(self, specs: Iterable[EpisodeSpec]) -> None:
        """Add episodes; they continue the numbers of the earlier ones."""
        for spec in specs:
            self._waiting.append((self._num_added, spec))
            self._num_added += 1
            self.num_members[spec.task.uid, spec.global_step, spec.validation] += 1
        self._changed.set()

    def close(self) -> None:
        """End the feed behind its last episode."""
        self.closed = True
        self._changed.set()

    def take_waiting(self) -> Numbered | None:
        """Return the next episode if there is one."""
        return self._waiting.popleft() if self._waiting else None

    async def take(self) -> Numbered | None:
        """Return the next episode, and wait for it if there is none yet; None at the end of the feed."""
        while not self._waiting and not self.closed:
            self._changed.clear()
            await self._changed.wait()
        return self.take_waiting()
