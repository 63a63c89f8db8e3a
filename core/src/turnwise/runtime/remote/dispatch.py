"""
Dispatch of episodes to workers: every episode is delivered exactly once, even if workers die.

The runtime calls a dispatcher from one event loop, and no method waits. So each method sees and leaves a consistent
state:

- An undelivered episode is in exactly one place: pending, quarantined, or held by one worker.
- `complete` is the only method that delivers, and it removes the episode. A second result finds none and is dropped.
- An episode that has lost its workspace or another resource is pending again, before the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import count

import structlog
from attrs import define, evolve, field, frozen

from turnwise.record.result import EpisodeResult
from turnwise.record.spec import EpisodeSpec
from turnwise.runtime.feed import Numbered
from turnwise.runtime.remote.quarantine import Quarantine
from turnwise.runtime.worker import Deliver, build_unrun_result, build_unstarted_result
from turnwise.types import Fault, Status

_NO_WORKER = -1


@frozen(eq=False)
class _Entry:
    """An undelivered episode, its number in its run, and the callback of the run."""

    spec: EpisodeSpec
    number: int
    deliver: Deliver


@define(eq=False)
class EpisodeDispatcher:
    """
    Tracks by key which worker holds each episode.

    A worker's death rarely tells which of its episodes caused it. So an episode with which `max_kills` workers have
    died is a suspect, and the `Quarantine` tests it. An episode that was tested alone on a worker that died is the
    cause, and fails.

    `num_quarantined` episodes failed because a worker died while it tested them alone.
    """

    max_kills: int = 2
    num_retried: int = field(default=0, init=False)
    num_quarantined: int = field(default=0, init=False)
    _keys: count[int] = field(factory=count, init=False)
    _entries: dict[int, _Entry] = field(factory=dict, init=False)
    _pending: deque[int] = field(factory=deque, init=False)
    # Keys in the order in which the worker starts them.
    _held: dict[int, dict[int, None]] = field(factory=dict, init=False)
    _kills: Counter[int] = field(factory=Counter, init=False)
    _quarantine: Quarantine = field(factory=Quarantine, init=False)
    _interrupted: set[int] = field(factory=set, init=False)

    def submit(self, numbered: Iterable[Numbered], deliver: Deliver) -> list[int]:
        """Add episodes of a run and return their keys, which are never reused."""
        keys = []
        # Runs overlap, and a late result of one must not look like a result of another: keys differ over all runs.
        for number, spec in numbered:
            key = next(self._keys)
            self._entries[key] = _Entry(spec, number, deliver)
            self._pending.append(key)
            keys.append(key)
        return keys

    def keys_of(self, deliver: Deliver) -> list[int]:
        """Return the keys of the undelivered episodes of the run with this callback."""
        return [key for key, entry in self._entries.items() if entry.deliver is deliver]

    @property
    def keys(self) -> list[int]:
        """Keys of the undelivered episodes."""
        return list(self._entries)

    def even_share(self, workers: Sequence[int]) -> int:
        """Return how many episodes each of these workers holds when the pending ones are shared evenly."""
        held = sum(len(self._held.get(worker, ())) for worker in workers)
        return -(-(len(self._pending) + held) // max(1, len(workers)))

    def acquire(self, worker: int, limit: int) -> list[tuple[int, EpisodeSpec]]:
        """Return episodes for a worker, until it holds `limit` of them; a group of suspects is never cut."""
        held = self._held.setdefault(worker, {})
        keys = self._quarantine.acquire(worker, busy=bool(held))
        if keys is None:
            keys = [self._pending.popleft() for _ in range(min(limit - len(held), len(self._pending)))]
        held.update(dict.fromkeys(keys))
        return [(key, self._entries[key].spec) for key in keys]

    def complete(self, worker: int, key: int, result: EpisodeResult) -> bool:
        """
        Deliver the result of an episode; a second result is dropped.

        Returns:
            Whether the episode runs again instead, because it has lost a resource.
        """
        self._held.get(worker, {}).pop(key, None)
        entry = self._entries.get(key)
        again = entry and entry.spec.after(result.fault)
        if entry and again and key not in self._interrupted:
            self._entries[key] = evolve(entry, spec=again)
            self._pending.appendleft(key)
            self.num_retried += 1
            return True
        if entry and again:  # as if its worker had died: an unstarted result can be resumed
            result = build_unstarted_result(entry.spec)
        self._kills.pop(key, None)
        self._interrupted.discard(key)
        # Removed before the callback, which may submit the next episodes.
        if entry := self._entries.pop(key, None):
            entry.deliver(entry.number, result)
        return False

    def count_held(self, worker: int) -> int:
        """Return the number of episodes that a worker holds."""
        return len(self._held.get(worker, ()))

    def requeue(self, worker: int, reason: str, max_started: int, *, moved: bool = False) -> bool:
        """
        Run the episodes of a dead worker again, and deliver the ones that must not run again.

        `max_started` is the most undelivered episodes that the worker had started; it starts them in their order. A
        worker that had to leave has `moved`, and no episode is to blame.

        Returns:
            Whether its episodes are to blame and not the worker.
        """
        held = list(self._held.pop(worker, ()))
        tested = self._quarantine.release(worker)
        interrupted = self._interrupted.intersection(held)
        for key in interrupted:
            # The run does not wait for it any longer. An unstarted result can be resumed.
            self.complete(worker, key, build_unstarted_result(self._entries[key].spec))
        left = [key for key in held if key not in interrupted]
        # An interrupted episode may have ended unstarted, so another may have started in its place.
        started = left[:max_started]
        if not moved:
            self._kills.update(started)
        suspects = [key for key in started if self._kills[key] >= self.max_kills]
        # Only a test convicts: two workers of a node may die one after the other, and the second had only this episode.
        if not moved and tested and len(suspects) == len(started) == 1 and not interrupted:
            left.remove(suspects[0])
            self._fail_quarantined(worker, suspects.pop(), reason)
        self.num_retried += len(left)
        self._quarantine.add(sorted(suspects))
        # In descending order, because each goes to the front: the oldest runs first again.
        self._pending.extendleft(sorted(set(left).difference(suspects), reverse=True))
        return tested

    def interrupt(self, keys: Sequence[int]) -> dict[int, list[int]]:
        """Deliver episodes that no worker holds as aborted; return the others by worker, which must end them soon."""
        interrupted = self._entries.keys() & set(keys)
        waiting = [key for key in (*self._pending, *self._quarantine.keys) if key in interrupted]
        self._pending = deque(key for key in self._pending if key not in interrupted)
        self._quarantine.remove(interrupted)
        for key in waiting:
            self.complete(_NO_WORKER, key, build_unstarted_result(self._entries[key].spec))
        # Remembered until the worker has ended them: if it dies first, they must not run again.
        self._interrupted |= interrupted.difference(waiting)
        return {worker: sorted(held.keys() & self._interrupted & interrupted) for worker, held in self._held.items()}

    def fail_all(self, reason: str) -> None:
        """Deliver every episode as failed: no worker is left."""
        self._pending.clear()
        self._quarantine.clear()
        self._held.clear()
        fault = Fault(owner="infra", kind="InfrastructureError", message=reason)
        for key in tuple(self._entries):
            self.complete(_NO_WORKER, key, build_unrun_result(self._entries[key].spec, Status.FAILED, fault))

    def _fail_quarantined(self, worker: int, key: int, reason: str) -> None:
        spec = self._entries[key].spec
        message = f"the episode is quarantined: {self._kills[key]} workers died while they ran it, the last: {reason}"
        structlog.get_logger().error("episode quarantined", task=spec.task.uid, rollout_n=spec.rollout_n, reason=reason)
        self.num_quarantined += 1
        fault = Fault(owner="infra", kind="PoisonedEpisode", message=message)
        self.complete(worker, key, build_unrun_result(spec, Status.FAILED, fault))
