"""Scores that arrive after their episode: the episodes that wait for one, and the scores that were accepted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from attrs import define, evolve, field

from turnwise import EpisodeResult, TrajectoryScore

EpisodeKey = tuple[str, int, bool, int]
"""Task uid, training step, whether it is a validation, and the number of the episode in its group."""

_REMEMBERED: Final = 65_536
"""Accepted scores that are remembered, to tell a repeated notification from a contradiction."""


def episode_key(episode: EpisodeResult) -> EpisodeKey:
    """Return the key of an episode."""
    return episode.task.uid, episode.global_step, episode.validation, episode.rollout_n


@define(eq=False)
class LateScores:
    """
    Tracks the episodes that wait for a score. It is not thread-safe: the buffer calls it under its lock.

    Attributes:
        timeout_s: seconds that an episode waits; None lets none wait.
        clock: returns seconds that never decrease.
    """

    timeout_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    # In the order of the deadlines, because all episodes wait for the same time.
    _deadlines: dict[EpisodeKey, float] = field(factory=dict, init=False)
    _accepted: dict[EpisodeKey, float] = field(factory=dict, init=False)
    # Episodes that take no score any more, and scores that came before their episodes.
    _ended: dict[EpisodeKey, None] = field(factory=dict, init=False)
    _early: dict[tuple[str, int, int | None], float] = field(factory=dict, init=False)

    def __contains__(self, key: EpisodeKey) -> bool:
        return key in self._deadlines

    def awaited_by(self, episode: EpisodeResult) -> bool:
        """Return whether an episode lacks a score that may still arrive: failed ones and ones without tokens do not."""
        unscored = self.timeout_s is not None and episode.reward is None
        return unscored and episode.trainable and bool(episode.trajectories)

    def add(self, key: EpisodeKey) -> None:
        """Let an episode wait from now on."""
        if self.timeout_s is not None:
            self._deadlines[key] = self.clock() + self.timeout_s

    def end(self, key: EpisodeKey) -> None:
        """Refuse later scores of an episode."""
        self._ended[key] = None
        _forget_oldest(self._ended)

    def take_early(self, key: EpisodeKey) -> float | None:
        """Return the score that came before an episode; None if none did."""
        for step in (key[1], None):
            score = self._early.pop((key[0], key[3], step), None)
            if score is not None:
                self._remember(key, score)
                return score
        return None

    def early(self) -> list[tuple[str, int, int | None, float]]:
        """Return the scores whose episodes have not come yet, as (uid, number, step, score)."""
        return [(*key, score) for key, score in self._early.items()]

    def hold(self, uid: str, rollout_n: int, score: float, global_step: int | None) -> bool:
        """Keep a score whose episode has not come yet; return whether it is new."""
        key = uid, rollout_n, global_step
        is_new = key not in self._early
        if (before := self._early.setdefault(key, score)) != score:
            raise ValueError(f"episode {uid}/{rollout_n} has the score {before}, and now gets another one, {score}")
        _forget_oldest(self._early)
        return is_new

    def _remember(self, key: EpisodeKey, score: float) -> None:
        self._accepted[key] = score
        _forget_oldest(self._accepted)

    def accept(self, uid: str, rollout_n: int, score: float, global_step: int | None) -> EpisodeKey | None:
        """
        Return the episode that a score is for; None if it has this score. Raise `ValueError` as `notify_score`.

        `KeyError` for an episode that has not come yet.
        """

        def match(key: EpisodeKey) -> bool:
            return (key[0], key[3]) == (uid, rollout_n) and global_step in (None, key[1])

        name = f"episode {uid}/{rollout_n}"
        waiting = [key for key in self._deadlines if match(key)]
        if len(waiting) > 1:
            raise ValueError(f"{name} waits at several steps: name the global_step of the score")
        if waiting:
            del self._deadlines[waiting[0]]
            self._remember(waiting[0], score)
            return waiting[0]
        accepted = [value for key, value in self._accepted.items() if match(key)]
        if not accepted and any(map(match, self._ended)):
            raise ValueError(f"{name} does not wait for a score: it has one, or its deadline is over")
        if not accepted:
            raise KeyError(name)
        if score not in accepted:
            raise ValueError(f"{name} has the score {accepted[-1]}, and now gets another one, {score}")
        return None

    def pop_expired(self) -> list[EpisodeKey]:
        """Return the episodes whose deadline is over, and stop waiting for their scores."""
        now = self.clock()
        expired = [key for key, deadline in self._deadlines.items() if deadline <= now]
        for key in expired:
            del self._deadlines[key]
            self.end(key)
        return expired

    def discard(self, key: EpisodeKey) -> None:
        """Stop waiting for the score of an episode, if it waits, and refuse a later one."""
        self._deadlines.pop(key, None)
        self.end(key)

    def seconds_left(self) -> float | None:
        """Return the seconds to the next deadline; None if nothing waits."""
        first = next(iter(self._deadlines.values()), None)
        return None if first is None else max(0.0, first - self.clock())


def with_score(episode: EpisodeResult, score: float) -> EpisodeResult:
    """Return the episode with a score on its last trajectory, and 0 on the others."""
    others = (TrajectoryScore(value=0.0) for _ in episode.trajectories[1:])
    return evolve(episode, scores=(*others, TrajectoryScore(value=score)))


def _forget_oldest(kept: dict[Any, Any]) -> None:
    if len(kept) > _REMEMBERED:
        del kept[next(iter(kept))]
