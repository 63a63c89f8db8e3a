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
from itertools import islice
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
        dropped: whether the buffer let go of it because it was too old.
    """

    episodes: tuple[EpisodeResult, ...]
    dropped: bool = field(default=False, init=False)

    @property
    def key(self) -> GroupKey:
        """What its episodes have in common."""
        return _key_of(self.episodes[0])

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


def _key_of(episode: EpisodeResult) -> GroupKey:
    return episode.task.uid, episode.global_step, episode.validation


@define(eq=False)
class TrajectoryBuffer:
    """
    Groups of episodes on their way from the rollout to the trainer.

    Attributes:
        group_size: episodes of a group.
        max_groups: whole groups that may wait; the `put` of one more waits for room.
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
    # All whole groups; those beyond `max_groups` wait for room, behind a `put` or after a restart.
    _groups: deque[EpisodeGroup] = field(factory=deque, init=False)
    _partial: dict[GroupKey, dict[int, EpisodeResult]] = field(factory=dict, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _version: int = field(default=0, init=False)
    _num_in_training: int = field(default=0, init=False)
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
            return min(len(self._groups), self.max_groups)

    # The rollout's side

    @property
    def num_ahead(self) -> int:
        """The groups that wait, and those that were taken for an update that is not made yet, see `set_version`."""
        with self._changed:
            return len(self._groups) + self._num_in_training

    def uids_of(self, step: int) -> set[str]:
        """Return the tasks of which a group of a training step is here, whole or not."""
        with self._changed:
            keys = [*self._partial, *(group.key for group in self._groups)]
        return {uid for uid, of_step, validation in keys if of_step == step and not validation}

    def put(self, episode: EpisodeResult, *, timeout_s: float | None = None) -> bool:
        """
        Add an episode; one that completes its group waits until there is room.

        Returns:
            Whether a group was completed and kept.

        Raises:
            TimeoutError: there was no room in time; the episode was not added.
            BufferClosedError: the buffer was closed.
            ValueError: the group has an episode of this `rollout_n` already, or is whole and here.
        """
        key = _key_of(episode)
        with self._changed:
            partial = self._partial.get(key, {})
            if episode.rollout_n in partial or any(group.key == key for group in self._groups):
                raise ValueError(f"episode {episode.uid} of step {episode.global_step} is in the buffer already")
            members = {**partial, episode.rollout_n: episode}
            if len(members) < self.group_size:
                self._partial[key] = members
                return False
            self._partial.pop(key, None)
            group = EpisodeGroup(tuple(members[number] for number in sorted(members)))
            if self.dynamic_sampling and not group.has_variance:
                self.counts["dropped_uniform"] += 1
                self._changed.notify_all()
                return False
            try:
                self._add(group, timeout_s)
            except BaseException:
                if partial:
                    self._partial[key] = partial
                raise
            return not group.dropped

    def _add(self, group: EpisodeGroup, timeout_s: float | None) -> None:
        """Add a whole group and wait until there is room for it; without, it is not added."""
        if self._closed:
            raise BufferClosedError("the buffer was closed")
        self._groups.append(group)
        self.counts["added"] += 1
        try:
            self._wait(lambda: self._closed or not self._is_beyond(group), timeout_s, "no room")
        finally:
            in_vain = self._is_beyond(group)
            if in_vain:
                self._groups.remove(group)
                self.counts["added"] -= 1
        if in_vain:
            raise BufferClosedError("the buffer was closed")
        # It may have waited for room, or been rolled out, through many versions.
        self._drop_stale()
        self._changed.notify_all()

    def _is_beyond(self, group: EpisodeGroup) -> bool:
        """Return whether there is no room for a group yet."""
        return group in islice(self._groups, self.max_groups, None)

    def close(self) -> None:
        """Say that nothing more will come; those who wait are woken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # The trainer's side

    def set_version(self, version: int) -> None:
        """Say which weights the trainer has after an update; groups that are now too far behind go."""
        with self._changed:
            self._version = version
            self._num_in_training = 0
            self._drop_stale()

    def take(
        self, num_groups: int, *, timeout_s: float | None = None, until_uniform: int | None = None
    ) -> list[EpisodeGroup]:
        """
        Take the oldest groups, waiting until there are enough.

        Args:
            num_groups: how many.
            timeout_s: how long to wait.
            until_uniform: do not wait any more, and return fewer or none, once `counts` has so many `dropped_uniform`.

        Raises:
            TimeoutError: there were too few in time; none was taken.
            BufferClosedError: the buffer was closed with too few.
            ValueError: more than the buffer ever holds.
        """
        if num_groups > self.max_groups:
            raise ValueError(f"{num_groups} groups are more than the buffer holds, {self.max_groups}")

        def enough() -> bool:
            gave_up = until_uniform is not None and self.counts["dropped_uniform"] >= until_uniform
            return gave_up or len(self._groups) >= num_groups

        with self._changed:
            self._wait(lambda: self._closed or enough(), timeout_s, "too few groups")
            if not enough():
                raise BufferClosedError(f"the buffer was closed with {len(self._groups)} of {num_groups} groups")
            taken = [self._groups.popleft() for _ in range(min(num_groups, len(self._groups)))]
            self.counts["taken"] += len(taken)
            self._num_in_training += len(taken)
            self._changed.notify_all()
            return taken

    def staleness(self, group: EpisodeGroup) -> int:
        """Return how many weight versions a group is behind the trainer."""
        oldest = group.oldest_version
        return 0 if oldest is None else self._version - oldest

    def _drop_stale(self) -> None:
        if self.stale == "correct":
            return
        for group in self._groups:
            group.dropped = self.staleness(group) > self.max_staleness
        kept = [group for group in self._groups if not group.dropped]
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
        """
        Return what `load_state_dict` takes: the episodes that are here, of whole groups and of others, and counts.

        A group whose `put` waits for room is among them.
        """
        with self._changed:
            waiting = [episode for group in self._groups for episode in group.episodes]
            partial = [episode for members in self._partial.values() for episode in members.values()]
            return {
                "waiting": waiting,
                "partial": partial,
                "counts": dict(self.counts),
                "version": self._version,
                "group_size": self.group_size,
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Stand where `state_dict` was taken.

        More whole groups than `max_groups` are not lost: those beyond it come in as there is room.

        Raises:
            ValueError: its groups have another size.
        """
        waiting: Sequence[EpisodeResult] = state["waiting"]
        size = self.group_size
        partial: dict[GroupKey, dict[int, EpisodeResult]] = {}
        for episode in state["partial"]:
            partial.setdefault(_key_of(episode), {})[episode.rollout_n] = episode
        saved_size = state.get("group_size", size)
        if saved_size != size:
            raise ValueError(f"its groups have {saved_size} episodes, and here they have {size}: rollout.n is another")
        if len(waiting) % size or any(len(members) >= size for members in partial.values()):
            raise ValueError(f"its episodes are not those of groups of {size}: rollout.n is another")
        with self._changed:
            starts = range(0, len(waiting), size)
            self._groups = deque(EpisodeGroup(tuple(waiting[start : start + size])) for start in starts)
            self._partial = partial
            self.counts = dict(state["counts"])
            self._version = int(state["version"])
            self._num_in_training = 0
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
