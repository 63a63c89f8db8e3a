"""
Where finished episodes wait for the trainer: whole groups in, whole groups out.

One side puts episodes in as they finish, the other takes groups; each may be a thread of its own. A group is whole or
it is not used. The buffer is bounded: `put` waits while it is full. What comes out is never further behind the
trainer's weights than the bound, unless stale groups are kept to be corrected by importance weights.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import define, field

from turnwise import EpisodeResult
from turnwise.errors import TurnwiseError

GroupKey = tuple[str, int, bool]


class BufferClosedError(TurnwiseError):
    """Nothing more will come, and fewer groups are left than were asked for."""


@define(eq=False)
class EpisodeGroup:
    """
    The episodes of one task at one step, in the order of their `rollout_n`.

    Attributes:
        episodes: all of them.
    """

    episodes: tuple[EpisodeResult, ...]

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled a token of it; None when no token was sampled."""
        versions = [
            int(record.weight_versions[record.response_mask == 1].min())
            for episode in self.episodes
            for record in episode.trajectories
            if record.response_mask.any()
        ]
        return min(versions, default=None)

    @property
    def has_variance(self) -> bool:
        """Whether its rewards differ, so that a baseline of the group leaves anything to learn."""
        rewards = {episode.reward for episode in self.episodes if episode.reward is not None and episode.trainable}
        return len(rewards) > 1


@define(eq=False)
class TrajectoryBuffer:
    """
    Groups of episodes on their way from the rollout to the trainer.

    Attributes:
        group_size: episodes of a group.
        max_groups: whole groups that may wait.
        max_staleness: weight versions that a group may be behind.
        stale: what becomes of one that is further behind: `drop` it, or `correct`: let it through.
        dynamic_sampling: drop groups without reward variance (DAPO, arXiv:2503.14476).
        counts: groups `added`, `taken`, `dropped_uniform`, `dropped_stale`, so far.
    """

    group_size: int
    max_groups: int
    max_staleness: int = 0
    stale: Literal["drop", "correct"] = "drop"
    dynamic_sampling: bool = False
    counts: dict[str, int] = field(init=False)
    _groups: deque[EpisodeGroup] = field(factory=deque, init=False)
    _partial: dict[GroupKey, dict[int, EpisodeResult]] = field(factory=dict, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _version: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        """Begin empty."""
        self.counts = {"added": 0, "taken": 0, "dropped_uniform": 0, "dropped_stale": 0}
        for name in ("group_size", "max_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"'{name}' must be at least 1: {getattr(self, name)}")

    def __len__(self) -> int:
        """Return the number of whole groups that wait."""
        with self._changed:
            return len(self._groups)

    # The rollout's side

    def put(self, episode: EpisodeResult, *, timeout_s: float | None = None) -> bool:
        """
        Add an episode; one that completes its group waits until there is room.

        Returns:
            Whether a group was completed and kept.

        Raises:
            TimeoutError: there was no room in time; the episode was not added.
            BufferClosedError: the buffer was closed.
            ValueError: the group has an episode of this `rollout_n` already.
        """
        key = (episode.task.uid, episode.global_step, episode.validation)
        with self._changed:
            partial = self._partial.setdefault(key, {})
            if episode.rollout_n in partial:
                raise ValueError(f"episode {episode.uid} of step {episode.global_step} is in the buffer already")
            if len(partial) + 1 < self.group_size:
                partial[episode.rollout_n] = episode
                return False
            members = {**partial, episode.rollout_n: episode}
            group = EpisodeGroup(tuple(members[number] for number in sorted(members)))
            if self.dynamic_sampling and not group.has_variance:
                del self._partial[key]
                self.counts["dropped_uniform"] += 1
                self._changed.notify_all()
                return False
            self._wait(lambda: len(self._groups) < self.max_groups or self._closed, timeout_s, "no room")
            if self._closed:
                raise BufferClosedError("the buffer was closed")
            del self._partial[key]
            self.counts["added"] += 1
            self._groups.append(group)
            # It may have waited for room, or been rolled out, through many versions.
            self._drop_stale()
            self._changed.notify_all()
            return bool(self._groups) and self._groups[-1] is group

    def close(self) -> None:
        """Say that nothing more will come; those who wait are woken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # The trainer's side

    def set_version(self, version: int) -> None:
        """Say which weights the trainer has; groups that are now too far behind go."""
        with self._changed:
            self._version = version
            self._drop_stale()

    def take(self, num_groups: int, *, timeout_s: float | None = None) -> list[EpisodeGroup]:
        """
        Take the oldest groups, waiting until there are enough.

        Raises:
            TimeoutError: there were too few in time; none was taken.
            BufferClosedError: the buffer was closed with too few.
            ValueError: more than the buffer ever holds.
        """
        if num_groups > self.max_groups:
            raise ValueError(f"{num_groups} groups are more than the buffer holds, {self.max_groups}")
        with self._changed:
            self._wait(lambda: len(self._groups) >= num_groups or self._closed, timeout_s, "too few groups")
            if len(self._groups) < num_groups:
                raise BufferClosedError(f"the buffer was closed with {len(self._groups)} of {num_groups} groups")
            taken = [self._groups.popleft() for _ in range(num_groups)]
            self.counts["taken"] += num_groups
            self._changed.notify_all()
            return taken

    def staleness(self, group: EpisodeGroup) -> int:
        """Return how many weight versions a group is behind the trainer."""
        oldest = group.oldest_version
        return 0 if oldest is None else self._version - oldest

    def _drop_stale(self) -> None:
        if self.stale == "correct":
            return
        kept = [group for group in self._groups if self.staleness(group) <= self.max_staleness]
        if len(kept) < len(self._groups):
            self.counts["dropped_stale"] += len(self._groups) - len(kept)
            self._groups = deque(kept)
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool], timeout_s: float | None, why: str) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"{why} in {timeout_s} s")
            self._changed.wait(left)

    # A restart

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes: the episodes that wait, of whole groups and of others, and counts."""
        with self._changed:
            waiting = [episode for group in self._groups for episode in group.episodes]
            partial = [episode for members in self._partial.values() for episode in members.values()]
            return {
                "waiting": waiting,
                "partial": partial,
                "counts": dict(self.counts),
                "version": self._version,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Stand where `state_dict` was taken; the sizes are those of this buffer."""
        waiting: Sequence[EpisodeResult] = state["waiting"]
        if len(waiting) % self.group_size:
            raise ValueError(f"{len(waiting)} episodes are no whole groups of {self.group_size}")
        with self._changed:
            starts = range(0, len(waiting), self.group_size)
            self._groups = deque(EpisodeGroup(tuple(waiting[start : start + self.group_size])) for start in starts)
            self._partial = {}
            for episode in state["partial"]:
                key = (episode.task.uid, episode.global_step, episode.validation)
                self._partial.setdefault(key, {})[episode.rollout_n] = episode
            self.counts = dict(state["counts"])
            self._version = int(state["version"])
            self._changed.notify_all()

    def forget(self, key: GroupKey) -> None:
        """Drop the episodes of a group that is not whole and never will be: uid, step, validation."""
        with self._changed:
            self._partial.pop(key, None)

    # torch's side

    def dataset(self, num_groups: int) -> Any:
        """
        Return a `torch.utils.data.IterableDataset` of lists of `num_groups` groups, until the buffer is closed.

        It reads this buffer of this process, so a `DataLoader` of it takes ``num_workers=0`` and ``batch_size=None``.
        """
        from torch.utils.data import IterableDataset

        buffer = self

        class BufferDataset(IterableDataset[list[EpisodeGroup]]):
            def __iter__(self) -> Iterator[list[EpisodeGroup]]:
                while True:
                    try:
                        yield buffer.take(num_groups)
                    except BufferClosedError:
                        return

        return BufferDataset()
