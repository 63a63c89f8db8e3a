"""The episodes that a call has still to start; more may be added while others run."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable

from attrs import define, field

from turnwise.protocols.reward import GroupKey
from turnwise.record.ended import EndedEpisode
from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec

Numbered = tuple[int, EpisodeSpec]


@define(eq=False)
class EpisodeFeed:
    """
    Numbered episodes in the order in which they start. A list of episodes is a feed that was closed at once.

    Everything but the construction happens on the runtime's event loop.

    Attributes:
        closed: whether no more episodes will come.
        num_members: the number of episodes of each group, as far as it is known. A group that was interrupted keeps
            its number, so a call that resumes a part of it does not take this part for the whole.
    """

    closed: bool = False
    num_members: Counter[GroupKey] = field(factory=Counter, init=False)
    _num_added_of: Counter[GroupKey] = field(factory=Counter, init=False)
    _ended: list[tuple[int, EpisodeResult]] = field(factory=list, init=False)
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
            if isinstance(spec.unfinished, EndedEpisode):
                self._ended.append((self._num_added, spec.unfinished.result))
            else:
                self._waiting.append((self._num_added, spec))
            self._num_added += 1
            self._num_added_of[spec.group] += 1
            self.num_members[spec.group] = max(
                self.num_members[spec.group], self._num_added_of[spec.group], spec.num_members
            )
        self._changed.set()

    def deliver_ended(self, deliver: Callable[[int, EpisodeResult], None]) -> None:
        """Deliver the episodes that ended in an earlier call; they do not run again."""
        ended, self._ended = self._ended, []
        for number, result in ended:
            deliver(number, result)

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
