"""What a caller iterates over while a run goes on in another thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Self

from attrs import define

from turnwise.result import EpisodeResult

Finished = tuple[int, EpisodeResult] | BaseException | None
"""An episode with its place, what ended the run, or its end."""


@define(eq=False)
class FinishedEpisodes:
    """
    Episodes with their places, as they finish. Not a generator, so that an interrupt does not end it.

    Attributes:
        total: how many there will be.
    """

    total: int
    _finished: queue.SimpleQueue[Finished]
    _accept: Callable[[tuple[int, EpisodeResult] | BaseException], tuple[int, EpisodeResult] | None]

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> tuple[int, EpisodeResult]:
        """Wait for the next episode."""
        while (item := self._finished.get()) is not None:
            if accepted := self._accept(item):
                return accepted
        self.close()
        raise StopIteration

    def close(self) -> None:
        """End the iteration, also one that waits in another thread or in the frame that a signal interrupted."""
        self._finished.put(None)
