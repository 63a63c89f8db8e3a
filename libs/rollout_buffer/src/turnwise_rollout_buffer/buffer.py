"""
The buffer between rollout and trainer: collects episodes to groups, and hands out whole groups.

The rollout puts episodes in as they finish; the trainer takes groups. Both may be in different threads. The buffer is
bounded: `put` waits while it is full. With a deadline for scores, an episode may be put before it is scored: its group
waits until the score arrives or the deadline is over. A group that is more than `max_staleness` weight versions behind
the trainer is dropped, unless stale groups are kept for correction by importance weights.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from attrs import define, field

from turnwise import EpisodeResult
from turnwise.errors import TurnwiseError
from turnwise_rollout_buffer.groups import EpisodeGroup, GroupKey, group_key
from turnwise_rollout_buffer.late_scores import EpisodeKey, LateScores, episode_key, with_score


class BufferClosedError(TurnwiseError):
    """The buffer was closed, and has fewer groups than requested, or no room."""


@define(eq=False)
class TrajectoryBuffer:
    """
    A bounded, thread-safe buffer of groups.

    Attributes:
        group_size: episodes in a group.
        max_groups: most whole groups in the buffer; a `put` that completes another one waits for room.
        max_staleness: most weight versions that a group may be behind the trainer.
        stale: `drop` groups that are further behind, or keep them for correction (`correct`).
        dynamic_sampling: drop groups without reward variance (DAPO, arXiv:2503.14476).
        late_scores: how long an episode without a score waits for `notify_score`. After that, it ends as not scored. By
            default, no episode waits.
        counts: number of groups `added`, `taken`, `dropped_uniform` and `dropped_stale`.
    """

    group_size: int
    max_groups: int
    max_staleness: int = 0
    stale: Literal["drop", "correct"] = "drop"
    dynamic_sampling: bool = False
    late_scores: LateScores = field(factory=LateScores)
    counts: dict[str, int] = field(init=False)
    # All whole groups. Groups beyond the first `max_groups` wait for room: their `put` has not returned, or they come
    # from the checkpoint of a larger buffer.
    _groups: deque[EpisodeGroup] = field(factory=deque, init=False)
    # Groups with missing episodes, or with episodes that wait for their scores.
    _partial: dict[GroupKey, dict[int, EpisodeResult]] = field(factory=dict, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _version: int = field(default=0, init=False)
    _num_in_training: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.counts = {"added": 0, "taken": 0, "dropped_uniform": 0, "dropped_stale": 0}
        for name in ("group_size", "max_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"'{name}' must be at least 1: {getattr(self, name)}")

    def __len__(self) -> int:
        with self._changed:
            self._end_overdue()
            return min(len(self._groups), self.max_groups)

    def qsize(self) -> int:
        """Return the number of whole groups that `take` can return."""
        return len(self)

    # Called by the rollout

    @property
    def num_held(self) -> int:
        """Groups in the buffer, also if they wait for scores."""
        with self._changed:
            self._end_overdue()
            return len(self._groups) + sum(len(members) == self.group_size for members in self._partial.values())

    @property
    def num_ahead(self) -> int:
        """Groups in the buffer, and groups in training: taken since the last `set_version`."""
        with self._changed:
            return self.num_held + self._num_in_training

    def uids_at(self, step: int) -> set[str]:
        """Return the tasks that have a group of this training step in the buffer, whole or partial."""
        with self._changed:
            keys = [*self._partial, *(group.key for group in self._groups)]
        return {uid for uid, group_step, validation in keys if group_step == step and not validation}

    def put(self, episode: EpisodeResult, *, timeout_s: float | None = None) -> bool:
        """
        Add an episode; if it completes its group, wait until there is room.

        Returns:
            Whether the episode completed a group that was kept.

        Raises:
            TimeoutError: there was no room in time; the episode was not added.
            BufferClosedError: the buffer was closed.
            ValueError: the buffer already has this episode, or its whole group.
        """
        key = group_key(episode)
        with self._changed:
            partial = self._partial.get(key, {})
            if episode.rollout_n in partial or any(group.key == key for group in self._groups):
                raise ValueError(f"episode {episode.uid} of step {episode.global_step} is already in the buffer")
            if episode.reward is None and episode.trajectories and episode.trainable:
                score = self.late_scores.take_early(episode_key(episode))
                episode = episode if score is None else with_score(episode, score)
            self._partial[key] = {**partial, episode.rollout_n: episode}
            if not self.late_scores.awaited_by(episode):
                self.late_scores.end(episode_key(episode))
            else:
                self.late_scores.add(episode_key(episode))
                self._changed.notify_all()  # a waiting `take` has to wake up at the deadline
            group = self._pop_whole(key)
            if group is None:
                return False
            try:
                self._add(group, timeout_s)
            except BaseException:
                if partial:
                    self._partial[key] = partial
                raise
            return not group.dropped

    def put_batch(self, episodes: Iterable[EpisodeResult]) -> int:
        """Add episodes one after the other, as `put` does; return how many groups they completed that were kept."""
        return sum(self.put(episode) for episode in episodes)

    def notify_score(self, uid: str, rollout_n: int, score: float, *, global_step: int | None = None) -> bool:
        """
        Set the score of an episode that was put without one, or that will be: the score may come before its episode.

        It never waits for room. An early score is kept until its episode is put, also in a buffer without
        `late_scores`, in which no episode waits.

        Args:
            uid: of the task.
            rollout_n: number of the episode in its group.
            score: becomes the score of the last trajectory.
            global_step: of the episode; needed if episodes of several steps have this name.

        Returns:
            Whether the score is new; False if the episode already has this score from an earlier call.

        Raises:
            ValueError: the episode takes no score any more, several wait, or it has another score.
        """
        with self._changed:
            self._end_overdue()
            try:
                key = self.late_scores.accept(uid, rollout_n, score, global_step)
            except KeyError:
                return self.late_scores.hold(uid, rollout_n, score, global_step)
            if key is None:
                return False
            members = self._partial[key[:3]]
            members[rollout_n] = with_score(members[rollout_n], score)
            self._release(key)
            return True

    def _pop_whole(self, key: GroupKey) -> EpisodeGroup | None:
        """Remove a partial group that is now whole and scored, and return it; None if it is not, or has no variance."""
        members = self._partial.get(key, {})
        if len(members) < self.group_size or any((*key, number) in self.late_scores for number in members):
            return None
        del self._partial[key]
        group = EpisodeGroup(tuple(members[number] for number in sorted(members)))
        if self.dynamic_sampling and not group.has_variance:
            self.counts["dropped_uniform"] += 1
            self._changed.notify_all()
            return None
        return group

    def _release(self, key: EpisodeKey) -> None:
        """Add the group of an episode that waits no longer, if this completes it, whether there is room or not."""
        if group := self._pop_whole(key[:3]):
            self._groups.append(group)
            self.counts["added"] += 1
            self._drop_stale()
            self._changed.notify_all()

    def _end_overdue(self) -> None:
        """Let episodes end as not scored if the deadline of their score is over."""
        for key in self.late_scores.pop_expired():
            self._release(key)

    def _add(self, group: EpisodeGroup, timeout_s: float | None) -> None:
        """Add a whole group and wait until there is room; if there is none in time, remove it again."""
        if self._closed:
            raise BufferClosedError("the buffer was closed")
        # The group is in `_groups` while it waits, so `state_dict` contains it and no other `put` can add it again:
        # `_wait` releases the lock.
        self._groups.append(group)
        self.counts["added"] += 1
        try:
            self._wait(lambda: self._closed or not self._is_beyond(group), timeout_s, "no room")
        finally:
            no_room = self._is_beyond(group)
            if no_room:
                self._groups.remove(group)
                self.counts["added"] -= 1
        if no_room:
            raise BufferClosedError("the buffer was closed")
        # The version may have risen during the rollout of the group, or while it waited for room.
        self._drop_stale()
        self._changed.notify_all()

    def _is_beyond(self, group: EpisodeGroup) -> bool:
        """Return whether a group still waits for room."""
        return group in islice(self._groups, self.max_groups, None)

    def close(self) -> None:
        """Declare that no more episodes will come; waiting calls return or raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # Called by the trainer

    def set_version(self, version: int) -> None:
        """Set the weight version after an update, and drop groups that are now too stale."""
        with self._changed:
            self._version = version
            self._num_in_training = 0
            self._drop_stale()

    def take(
        self, num_groups: int, *, timeout_s: float | None = None, uniform_limit: int | None = None
    ) -> list[EpisodeGroup]:
        """
        Take the oldest groups; wait until there are enough.

        Args:
            num_groups: number of groups.
            timeout_s: longest wait; None waits without limit.
            uniform_limit: return the groups that there are, possibly none, once `counts` has this many
                `dropped_uniform`.

        Raises:
            TimeoutError: there were too few groups in time; none was taken.
            BufferClosedError: the buffer was closed with too few groups.
            ValueError: `num_groups` is more than `max_groups`.
        """
        if num_groups > self.max_groups:
            raise ValueError(f"cannot take {num_groups} groups: the buffer holds at most {self.max_groups}")

        def enough() -> bool:
            too_many_dropped = uniform_limit is not None and self.counts["dropped_uniform"] >= uniform_limit
            return too_many_dropped or len(self._groups) >= num_groups

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
        while True:
            self._end_overdue()
            if until():
                return
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"{why} in {timeout_s} s")
            waits = [seconds for seconds in (left, self.late_scores.seconds_left()) if seconds is not None]
            self._changed.wait(min(waits, default=None))

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """
        Return the episodes of whole groups (`waiting`) and of others (`partial`), the counts and the version.

        A group whose `put` waits for room is among the whole ones.
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
                "early_scores": self.late_scores.early(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Restore a state returned by `state_dict`.

        If it has more than `max_groups` whole groups, the rest waits for room.

        Raises:
            ValueError: the state is of a buffer with another group size.
        """
        waiting: Sequence[EpisodeResult] = state["waiting"]
        size = self.group_size
        partial: dict[GroupKey, dict[int, EpisodeResult]] = {}
        for episode in state["partial"]:
            partial.setdefault(group_key(episode), {})[episode.rollout_n] = episode
        saved_size = state.get("group_size", size)
        if saved_size != size:
            raise ValueError(f"checkpoint was written with rollout.n={saved_size}, but the config has rollout.n={size}")
        if len(waiting) % size or any(len(members) > size for members in partial.values()):
            raise ValueError(f"checkpoint has episodes that do not form groups of rollout.n={size}")
        with self._changed:
            starts = range(0, len(waiting), size)
            self._groups = deque(EpisodeGroup(tuple(waiting[start : start + size])) for start in starts)
            self._partial = partial
            self.counts = dict(state["counts"])
            self._version = int(state["version"])
            self._num_in_training = 0
            for uid, number, step, score in state.get("early_scores", ()):
                self.late_scores.hold(uid, number, score, step)
            for episode in filter(self.late_scores.awaited_by, state["partial"]):
                self.late_scores.add(episode_key(episode))  # the time for a score starts again
            self._groups.extend(group for key in tuple(partial) if (group := self._pop_whole(key)))
            self._changed.notify_all()

    def discard(self, key: GroupKey) -> None:
        """Drop the episodes of a group that will get no more of them; the key is (uid, step, validation)."""
        with self._changed:
            if len(self._partial.get(key, ())) < self.group_size:  # others wait for their scores
                for number in self._partial.pop(key, ()):
                    self.late_scores.discard((*key, number))

    # torch

    def dataset(self, num_groups: int) -> Any:
        """
        Return a `torch.utils.data.IterableDataset` of lists of `num_groups` groups; it ends when the buffer is closed.

        It reads from this process, so use it with ``DataLoader(dataset, num_workers=0, batch_size=None)``.
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
