"""The contracts of rewards and postprocessors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from attrs import frozen

from turnwise.protocols.agent import Episode
from turnwise.record.result import EpisodeResult
from turnwise.types import Score, Task


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
class GradingReward(Protocol):
    """
    A reward that grades what the agent left in the sessions of its tools. Other rewards lack the method.

    Its `score` finds them by `Episode.open_tool`, on the machine of the episode: no reward worker calls it. The tools
    are released after it.
    """

    def grading_s(self, task: Task) -> float:
        """Return the seconds that scoring an episode of a task may take, in place of `rollout.deadlines.reward_s`."""


GroupKey = tuple[str, int, bool]
"""Task uid, training step, and whether it is a validation."""


@frozen(kw_only=True)
class GroupCall:
    """
    A call whose groups are scored.

    Attributes:
        label: of the reward with its plugin, for errors.
        num_members: returns how many episodes a group has in this call, as far as it is known.
        put: delivers an episode, scored or failed.
        hold: delivers an ended episode of an interrupted group as unfinished, because it waits for the other members.
        ask: returns the answer of `score_group` within seconds, from a reward worker if there is one; raises
            `TimeoutError` or `BoundaryError`.
    """

    label: str
    num_members: Callable[[GroupKey], int]
    put: Callable[[int, EpisodeResult], None]
    hold: Callable[[int, EpisodeResult], None]
    ask: Callable[[Sequence[EpisodeResult], float], Awaitable[object]]


@runtime_checkable
class GroupReward(Protocol):
    """
    Scores the ended episodes of a task together.

    `turnwise_rollout_buffer.GroupReward` is the base class of group rewards: it has all but `score_group`.
    """

    def score_group(self, episodes: Sequence[EpisodeResult]) -> object:
        """
        Return a number or a `Score` for each episode, in their order, or an awaitable of that.

        Args:
            episodes: of one task, at least one and none that failed, with the scores of the run's `reward`.

        An exception fails these episodes, owned by `reward`.
        """

    def collect(self, call: GroupCall) -> AbstractAsyncContextManager[Callable[[int, EpisodeResult], None]]:
        """
        Return a context whose function gets each episode of a call when it ends; the end of the context delivers all.

        A group is scored once, when all its members have ended. A group with unfinished members has no score:
        `call.hold` delivers its ended members, and the call that resumes the group gets them again.
        """

    def unscored(self, episode: EpisodeResult) -> EpisodeResult | None:
        """Return an ended episode as it was before its group was scored; None if the episode must run again."""


@runtime_checkable
class Postprocessor(Protocol):
    """Adds fields to a batch."""

    def process(self, batch: Any) -> Mapping[str, Any]:
        """
        Return new fields for a `turnwise.PackedBatch`, by name.

        A field is a (B,) tensor; or B tensors, one for each row, with a value for each token of the row or for each of
        its response tokens. `batch.split` gives the rows of a column. No pads are made, so memory grows with the real
        tokens, however long one row is.
        """
