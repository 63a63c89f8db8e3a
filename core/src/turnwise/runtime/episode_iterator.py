"""Iterator over the episodes of a call, while the runtime works in another thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Self

from attrs import define

from turnwise.record.result import EpisodeResult

Finished = tuple[int, EpisodeResult] | BaseException | None
"""An episode with its number, an exception that ended the call, or None at the end."""


@define(eq=False)
class FinishedEpisodes:
    """
    Episodes with their numbers, as they finish.

    It is not a generator: an exception inside a generator's frame, such as an interrupt, would end the iteration.

    Attributes:
        total: number of episodes of the call.
    """

    total: int
    _finished: queue.SimpleQueue[Finished]
    _accept: Callable[[tuple[int, EpisodeResult] | BaseException], tuple[int, EpisodeResult] | None]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, EpisodeResult]:
        while (item := self._finished.get()) is not None:
            if accepted := self._accept(item):  # None for an episode that the prompt policy drops
                return accepted
        self.close()  # another call of `next` must end too, and not wait for an empty queue
        raise StopIteration

    def close(self) -> None:
        """End the iteration, even if another thread or the frame below a signal handler waits in it."""
        self._finished.put(None)
