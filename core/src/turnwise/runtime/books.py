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

    Attributes:
        max_kills: workers that an episode may kill before it is set aside.
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
    def num_open(self) -> int:
        """Episodes that were not delivered yet."""
        return len(self._entries)

    def take(self, worker: int, most: int) -> list[tuple[int, EpisodeSpec]]:
        """Give a worker episodes, until it has `most`."""
        given = self._given.setdefault(worker, set())
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
        """Put back what a dead worker had; what has killed too many is delivered as failed."""
        for key in sorted(self._given.pop(worker, set()), reverse=True):
            self._kills[key] += 1
            if key in self._cut:
                self.finish(worker, key, unstarted(self._entries[key].spec))
            elif self._kills[key] >= self.max_kills:
                self._set_aside(worker, key, reason)
            else:
                self.num_retried += 1
                self._pending.appendleft(key)

    def cut(self, keys: Sequence[int]) -> dict[int, list[int]]:
        """Deliver those of some episodes that wait here as aborted, and return by worker those that it must end."""
        cut = self._entries.keys() & set(keys)
        waiting = [key for key in self._pending if key in cut]
        self._pending = deque(key for key in self._pending if key not in cut)
        for key in waiting:
            self.finish(-1, key, unstarted(self._entries[key].spec))
        self._cut |= cut.difference(waiting)
        return {worker: sorted(given & self._cut & cut) for worker, given in self._given.items()}

    def fail_all(self, reason: str) -> None:
        """Deliver everything that is open as failed: there is nobody left to run it."""
        self._pending.clear()
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
