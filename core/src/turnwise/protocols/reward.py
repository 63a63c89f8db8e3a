"""The contracts of rewards and postprocessors."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from turnwise.protocols.agent import Episode
from turnwise.types import Score


@runtime_checkable
class Reward(Protocol):
    """Scores a finished episode, inside the rollout; `score` may be sync or async."""

    def score(self, episode: Episode) -> Score | Sequence[Score] | Awaitable[Score | Sequence[Score]]:
        """
        Return a `Score`, or one for each record, or an awaitable of that.

        An empty sequence leaves the episode unscored, which differs from a score of 0.

        An exception fails the episode, owned by `reward`.
        """


@runtime_checkable
class Postprocessor(Protocol):
    """Adds fields to a batch."""

    def process(self, batch: Any) -> Mapping[str, Any]:
        """Return new fields for a `turnwise.batch.rollout_batch.RolloutBatch`: name to tensor of B rows."""
