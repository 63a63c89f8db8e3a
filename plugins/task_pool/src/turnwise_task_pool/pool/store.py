"""
Rollouts of tasks, their leases and results, and the protocol of stores that keep them.

A rollout is `ready`, then `leased`, and ends as `done` or `dead`. A lease that fails or expires makes its rollout ready
again until no attempt is left. Each lease has a fence, a number that grows with every lease of the store: news of a
lease count only while its rollout has the same fence, so an agent that was given up cannot disturb its successor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from attrs import field, frozen

from turnwise.errors import Owner
from turnwise.types import JsonDict
from turnwise_gateway.control.scores import ControlError, Verdict


class PoolError(ControlError):
    """A task or a number that a pool does not accept."""


class State(StrEnum):
    """State of a rollout."""

    READY = "ready"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"


@frozen(kw_only=True)
class PoolTask:
    """
    A task of a group, as agents get it.

    Attributes:
        uid: of the task.
        global_step: training step that asked for it.
        rollouts: numbers of the rollouts to hand out.
        content: JSON object that agents read.
    """

    uid: str
    global_step: int = 0
    rollouts: Sequence[int] = (0,)
    content: JsonDict = field(factory=dict)


@frozen(kw_only=True)
class Lease:
    """
    An attempt at a rollout that ends with its time, unless the agent renews it.

    Attributes:
        id: names the attempt in requests.
        attempt: number of this attempt at the rollout, from 1.
        worker: name that the agent gave itself.
        uid: of the task.
        global_step: training step that asked for it.
        rollout_n: number of the rollout in its group.
        fence: larger than that of every earlier lease.
        content: the task.
        until: time of the store's clock at which the lease expires, in seconds.
    """

    id: str
    attempt: int
    worker: str
    uid: str
    global_step: int
    rollout_n: int
    fence: int
    content: JsonDict
    until: float


@frozen(kw_only=True)
class RolloutView:
    """
    A rollout of a pool as people see it.

    Attributes:
        uid: of the task.
        global_step: training step that asked for it.
        rollout_n: number of the rollout in its group.
        state: of the rollout.
        attempt: number of leases so far.
        worker: name of the agent with the last lease; empty before the first one.
        expires_in_s: seconds until the lease expires; None without one.
        reason: of the failure of a dead rollout.
    """

    uid: str
    global_step: int
    rollout_n: int
    state: State
    attempt: int
    worker: str
    expires_in_s: float | None
    reason: str


@frozen(kw_only=True)
class PoolResult:
    """
    The end of a rollout; there is exactly one for each.

    Attributes:
        number: place in the order of the results, from 1. A reader that keeps the last number reads each result once.
        uid: of the task.
        global_step: training step that asked for it.
        rollout_n: number of the rollout in its group.
        state: `done` or `dead`.
        score: JSON value that the agent reported; None when it reported none, and for a dead rollout.
        metrics: numbers that the agent reported.
        owner: of the fault of a dead rollout.
        reason: of the last failure of a dead rollout.
        attempt: number of leases that there were.
        fence: of the last lease.
    """

    number: int
    uid: str
    global_step: int
    rollout_n: int
    state: State
    score: object = None
    metrics: Mapping[str, float] = field(factory=dict)
    owner: Owner | None = None
    reason: str = ""
    attempt: int
    fence: int


class TaskStore(Protocol):
    """
    Keeps rollouts. Every method is one transaction: it happens as a whole or not at all, whatever dies.

    Methods block and are called from one thread at a time. Times are seconds of the clock of the caller.
    """

    def put(self, task: PoolTask, *, capacity: int) -> bool:
        """
        Add the rollouts of a task; rollouts that the store has already stay as they are.

        Returns:
            False when more than `capacity` rollouts would then be ready or leased; nothing was added.

        Raises:
            PoolError: the store has this task with another content, or `capacity` is too small for it.
        """

    def lease(self, worker: str, *, now: float, lease_s: float) -> Lease | None:
        """Lease the first ready rollout, in the order of groups and then of numbers; None when there is none."""

    def withdraw(self, lease: Lease) -> None:
        """Take back a lease that no agent has seen; the attempt does not count."""

    def renew(self, lease_id: str, fence: int, *, now: float, lease_s: float) -> Verdict:
        """Let a lease expire `lease_s` from now."""

    def complete(
        self, lease_id: str, fence: int, *, now: float, score: object = None, metrics: Mapping[str, float] | None = None
    ) -> Verdict:
        """End a rollout with a score, a finite JSON value."""

    def fail(self, lease_id: str, fence: int, *, now: float, owner: Owner, reason: str) -> Verdict:
        """End an attempt; the rollout is ready again, or dead when it was the last attempt."""

    def expire(self, *, now: float) -> list[Lease]:
        """End the leases whose time is over, like failures that `infra` owns, and return them."""

    def next_expiry(self) -> float | None:
        """Return the earliest time at which a lease expires; None without leases."""

    def requeue(self) -> int:
        """End all leases because their sessions died with another process; return how many there were."""

    def recover(self, *, now: float, lease_s: float) -> None:
        """Give every lease `lease_s` from now, because agents could not renew it while no process served them."""

    def count(self) -> dict[State, int]:
        """Return the number of rollouts in each state."""

    def is_empty(self) -> bool:
        """Return whether every rollout has ended."""

    def results(self, *, after: int = 0, limit: int = 1000) -> list[PoolResult]:
        """Return results with a larger number than `after`, in order."""

    def result_of(self, uid: str, global_step: int, rollout_n: int) -> PoolResult | None:
        """Return the result of a rollout; None while it has none."""

    def find_end(self, lease_id: str) -> Verdict:
        """Return `LATE` for any lease that the store has given out, and `UNKNOWN` for a name that no lease has."""

    def is_leased(self, lease: Lease) -> bool:
        """Return whether a lease has not ended; an expired lease ends with the next `expire`."""

    def abandon(self, uid: str, global_step: int, rollout_n: int, *, owner: Owner, reason: str) -> bool:
        """End a rollout as dead, whoever has a lease of it; return whether it had not ended."""

    def leases(self) -> list[Lease]:
        """Return the leases that have not ended."""

    def changes(self) -> int:
        """Return a number that differs after another process changed the store."""

    def close(self) -> None:
        """Free everything; a second call does nothing."""
