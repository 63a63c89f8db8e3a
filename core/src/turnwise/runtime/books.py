"""
The driver's books: which episode is with which worker, so that each is delivered exactly once whatever dies.

Plain bookkeeping without waiting: the Ray runtime calls it from one event loop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count

import structlog
from attrs import define, field, frozen

from turnwise.episode_spec import EpisodeSpec
from turnwise.result import EpisodeResult
from turnwise.runtime.worker import Deliver, not_run, unstarted
from turnwise.types import Fault, Status


@frozen(eq=False)
class _Entry:
    """One episode that was asked for."""

    spec: EpisodeSpec
    number: int
    deliver: Deliver
    ended: Callable[[], None]


@define(eq=False)
class Books:
    """
    Episodes by a key of their own, unique in the runtime's life.

    Who is with a worker that dies may be its victim rather than the cause. So an episode that was with too many of them
    runs alone, with one worker after the other at a time, and is set aside when it kills that one as well.

    Attributes:
        max_kills: workers that may die with an episode before it runs alone, or if it was alone, is set aside.
        num_retried: episodes that were run again because their worker died.
        num_set_aside: episodes that killed too many.
    """

    max_kills: int = 2
    num_retried: int = field(default=0, init=False)
    num_set_aside: int = field(default=0, init=False)
    _keys: count[int] = field(factory=count, init=False)
    _entries: dict[int, _Entry] = field(factory=dict, init=False)
    _pending: deque[int] = field(factory=deque, init=False)
    _given: dict[int, set[int]] = field(factory=dict, init=False)
    _kills: Counter[int] = field(factory=Counter, init=False)
    _suspects: deque[int] = field(factory=deque, init=False)
    _alone: int | None = field(default=None, init=False)
    _cut: set[int] = field(factory=set, init=False)

    def open(self, specs: Sequence[EpisodeSpec], deliver: Deliver, ended: Callable[[], None]) -> list[int]:
        """Ask for episodes and return their keys; `ended` is called after the last of them was delivered."""
        left, keys = len(specs), []

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                ended()

        for number, spec in enumerate(specs):
            key = next(self._keys)
            self._entries[key] = _Entry(spec, number, deliver, one_ended)
            self._pending.append(key)
            keys.append(key)
        return keys

    @property
    def keys(self) -> list[int]:
        """Episodes that were not delivered yet."""
        return list(self._entries)

    @property
    def num_open(self) -> int:
        """How many they are."""
        return len(self._entries)

    def take(self, worker: int, most: int) -> list[tuple[int, EpisodeSpec]]:
        """Give a worker episodes, until it has `most`; one that is to run suspects ends its others before."""
        given = self._given.setdefault(worker, set())
        if self._alone is None and self._suspects:
            self._alone = worker
        if self._alone == worker and not given and not self._suspects:
            self._alone = None
        if self._alone == worker:
            keys = [] if given else [self._suspects.popleft()]
        else:
            keys = [self._pending.popleft() for _ in range(min(most - len(given), len(self._pending)))]
        given.update(keys)
        return [(key, self._entries[key].spec) for key in keys]

    def finish(self, worker: int, key: int, result: EpisodeResult) -> None:
        """Deliver an episode; a second result of one is dropped."""
        self._given.get(worker, set()).discard(key)
        self._kills.pop(key, None)
        self._cut.discard(key)
        if entry := self._entries.pop(key, None):
            entry.deliver(entry.number, result)
            entry.ended()

    def lose(self, worker: int, reason: str) -> None:
        """Put back what a dead worker had; what has killed too many, the last of them alone, is delivered as failed."""
        given = self._given.pop(worker, set())
        if self._alone == worker:
            self._alone = None
        for key in sorted(given, reverse=True):
            self._kills[key] += 1
            if key in self._cut:
                self.finish(worker, key, unstarted(self._entries[key].spec))
            elif self._kills[key] < self.max_kills:
                self.num_retried += 1
                self._pending.appendleft(key)
            elif len(given) > 1:
                self.num_retried += 1
                self._suspects.appendleft(key)
            else:
                self._set_aside(worker, key, reason)

    def cut(self, keys: Sequence[int]) -> dict[int, list[int]]:
        """Deliver those of some episodes that wait here as aborted, and return by worker those that it must end."""
        cut = self._entries.keys() & set(keys)
        waiting = [key for key in (*self._pending, *self._suspects) if key in cut]
        self._pending = deque(key for key in self._pending if key not in cut)
        self._suspects = deque(key for key in self._suspects if key not in cut)
        for key in waiting:
            self.finish(-1, key, unstarted(self._entries[key].spec))
        self._cut |= cut.difference(waiting)
        return {worker: sorted(given & self._cut & cut) for worker, given in self._given.items()}

    def fail_all(self, reason: str) -> None:
        """Deliver everything that is open as failed: there is nobody left to run it."""
        self._pending.clear()
        self._suspects.clear()
        self._given.clear()
        fault = Fault(owner="infra", kind="InfrastructureError", message=reason)
        for key in tuple(self._entries):
            self.finish(-1, key, not_run(self._entries[key].spec, Status.FAILED, fault))

    def _set_aside(self, worker: int, key: int, reason: str) -> None:
        spec = self._entries[key].spec
        message = f"the episode was set aside: {self._kills[key]} workers died while they ran it, the last: {reason}"
        structlog.get_logger().error("episode set aside", task=spec.task.uid, rollout_n=spec.rollout_n, reason=reason)
        self.num_set_aside += 1
        fault = Fault(owner="infra", kind="PoisonedEpisode", message=message)
        self.finish(worker, key, not_run(spec, Status.FAILED, fault))
