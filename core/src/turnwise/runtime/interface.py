"""The interface between the manager and a runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from turnwise.events.observer import Wait
from turnwise.protocols.weights import UpdateReport
from turnwise.runtime.feed import EpisodeFeed
from turnwise.runtime.worker import Deliver
from turnwise.types import Capabilities
from turnwise.weights.sources import Weights


class Runtime(Protocol):
    """
    Runs episodes in this process or on a cluster. All methods run on one event loop.

    `RolloutManager` documents the methods that have no text here.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self) -> None:
        """Start engines and workers."""

    async def run(self, feed: EpisodeFeed, deliver: Deliver, interrupt: asyncio.Event | None = None) -> None:
        """
        Run the episodes of a feed to its end, and deliver each once, with its number and its result.

        Several calls may run at the same time. `interrupt` aborts the unfinished episodes of this call when it is set,
        after the feed was closed.
        """

    async def abort(self) -> None:
        """Abort running episodes; `run` still delivers every spec."""

    async def resize(self, num_replicas: int) -> None: ...
    async def update_weights(self, weights: Weights, version: int) -> UpdateReport: ...
    async def sleep(self, level: int) -> None: ...
    async def wake_up(self, tags: Sequence[str]) -> None: ...
    async def memory_bytes(self) -> int: ...

    async def counts(self) -> dict[str, int]:
        """Return the counters of restarts, retries and migrations; see `RolloutManager.stats`."""

    async def waits(self) -> list[Wait]:
        """Return the parts of the run that it waits for now."""

    async def addresses(self) -> dict[str, dict[str, str]]: ...

    async def stop(self) -> None:
        """Free everything; a second call does nothing."""
