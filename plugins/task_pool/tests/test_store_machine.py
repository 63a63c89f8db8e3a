"""Random histories of a pool equal those of a simple model in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attrs import define, field
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from turnwise_gateway.control.scores import Verdict
from turnwise_task_pool.pool.sqlite_store import SqliteStore
from turnwise_task_pool.pool.store import Lease, PoolTask, State

LEASE_S = 10.0
CAPACITY = 6
MAX_ATTEMPTS = 2
NUMBERS = st.sampled_from([None, 0.0, 0.5, 1.0])


@define(eq=False)
class Rollout:
    """A rollout of the model."""

    order: tuple[int, int]
    state: str = "ready"
    attempts: int = 0
    fence: int = 0
    until: float = 0.0
    ending: str = ""
    score: float | None = None


@define(eq=False)
class Model:
    """The promises of a store, without a store."""

    rollouts: dict[tuple[str, int, int], Rollout] = field(factory=dict)
    groups: dict[tuple[str, int], int] = field(factory=dict)
    ends: list[tuple[str, int, int]] = field(factory=list)
    fence: int = 0

    def end_attempt(self, key: tuple[str, int, int], ending: str) -> None:
        rollout = self.rollouts[key]
        rollout.ending = ending
        rollout.state = "dead" if rollout.attempts == MAX_ATTEMPTS else "ready"
        if rollout.state == "dead":
            self.ends.append(key)

    def verdict(self, lease: Lease, now: float, ending: str) -> Verdict:
        rollout = self.rollouts[key_of(lease)]
        if rollout.fence != lease.fence:
            return Verdict.LATE
        if rollout.state == "leased":
            return Verdict.ACCEPTED if now < rollout.until else Verdict.LATE
        return Verdict.REPEATED if rollout.ending == ending else Verdict.LATE


def key_of(lease: Lease) -> tuple[str, int, int]:
    return lease.uid, lease.global_step, lease.rollout_n


class StoreMachine(RuleBasedStateMachine):
    """Producers, agents and time in any order, with agents that say anything twice, late or wrongly."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = self.open()
        self.model = Model()
        self.now = 1000.0

    def open(self) -> SqliteStore:
        store = SqliteStore(Path(self.folder.name) / "pool.sqlite", max_attempts=MAX_ATTEMPTS)
        store._run("PRAGMA synchronous=OFF")  # nobody cuts the power here
        return store

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()

    @rule(uid=st.sampled_from("abc"), step=st.integers(0, 1), rollouts=st.sets(st.integers(0, 3), min_size=1))
    def put(self, uid: str, step: int, rollouts: set[int]) -> None:
        new = {n for n in rollouts if (uid, step, n) not in self.model.rollouts}
        num_open = sum(each.state in ("ready", "leased") for each in self.model.rollouts.values())
        fits = not new or num_open + len(new) <= CAPACITY
        task = PoolTask(uid=uid, global_step=step, rollouts=sorted(rollouts), content={"q": uid})
        assert fits == self.store.put(task, capacity=CAPACITY)
        if fits:
            number = self.model.groups.setdefault((uid, step), len(self.model.groups))
            self.model.rollouts |= {(uid, step, n): Rollout(order=(number, n)) for n in new}

    @rule(target=leases)
    def lease(self) -> object:
        lease = self.store.lease("w", now=self.now, lease_s=LEASE_S)
        ready = [(each.order, key) for key, each in self.model.rollouts.items() if each.state == "ready"]
        if not ready:
            assert lease is None
            return multiple()
        assert lease is not None
        _order, key = min(ready)
        rollout = self.model.rollouts[key]
        rollout.state, rollout.attempts = "leased", rollout.attempts + 1
        rollout.until = self.now + LEASE_S
        assert key == key_of(lease)
        assert lease.attempt == rollout.attempts
        assert lease.content == {"q": lease.uid}
        assert lease.fence > self.model.fence
        self.model.fence = rollout.fence = lease.fence
        return lease

    @rule(lease=consumes(leases))
    def withdraw(self, lease: Lease) -> None:
        """A lease that nobody has seen is taken back at once, so before it ends in another way."""
        rollout = self.model.rollouts[key_of(lease)]
        self.store.withdraw(lease)
        if rollout.fence == lease.fence and rollout.state == "leased":
            rollout.state, rollout.attempts, rollout.ending = "ready", rollout.attempts - 1, "withdrawn"

    @rule(lease=leases)
    def renew(self, lease: Lease) -> None:
        expected = self.model.verdict(lease, self.now, "renewed")
        assert expected is self.store.renew(lease.id, lease.fence, now=self.now, lease_s=LEASE_S)
        if expected is Verdict.ACCEPTED:
            self.model.rollouts[key_of(lease)].until = self.now + LEASE_S

    @rule(lease=leases, score=NUMBERS)
    def complete(self, lease: Lease, score: float | None) -> None:
        rollout = self.model.rollouts[key_of(lease)]
        expected = self.model.verdict(lease, self.now, "completed")
        if expected is Verdict.REPEATED and rollout.score != score:
            expected = Verdict.CONFLICT
        assert expected is self.store.complete(lease.id, lease.fence, now=self.now, score=score)
        if expected is Verdict.ACCEPTED:
            rollout.state, rollout.ending, rollout.score = "done", "completed", score
            self.model.ends.append(key_of(lease))

    @rule(lease=leases)
    def fail(self, lease: Lease) -> None:
        expected = self.model.verdict(lease, self.now, "failed")
        assert expected is self.store.fail(lease.id, lease.fence, now=self.now, owner="agent", reason="r")
        if expected is Verdict.ACCEPTED:
            self.model.end_attempt(key_of(lease), "failed")

    @rule(lease=leases)
    def abandon(self, lease: Lease) -> None:
        key = key_of(lease)
        rollout = self.model.rollouts[key]
        is_open = rollout.state in ("ready", "leased")
        assert is_open == self.store.abandon(*key, owner="infra", reason="r")
        if is_open:
            rollout.state, rollout.ending = "dead", "abandoned"
            self.model.ends.append(key)

    @rule(lease=leases, other=leases)
    def use_another_fence(self, lease: Lease, other: Lease) -> None:
        """The fence of another lease opens nothing."""
        if lease.fence != other.fence:
            assert self.store.complete(lease.id, other.fence, now=self.now, score=9.0) is Verdict.LATE

    @rule(name=st.one_of(st.text(), st.from_regex(r"[0-9]{1,30}-[0-9]{1,30}-[0-9]{1,30}", fullmatch=True)))
    def use_an_unknown_lease(self, name: str) -> None:
        """No made-up name ends a lease: at best it is that of one that was, with another fence."""
        verdict = self.store.complete(name, -1, now=self.now, score=9.0)
        assert verdict in (Verdict.UNKNOWN, Verdict.LATE)

    @rule(seconds=st.sampled_from([0.5, 5.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        over = [
            (rollout.fence, key)
            for key, rollout in self.model.rollouts.items()
            if rollout.state == "leased" and rollout.until <= self.now
        ]
        assert [key for _fence, key in sorted(over)] == [key_of(each) for each in self.store.expire(now=self.now)]
        for _fence, key in sorted(over):
            self.model.end_attempt(key, "expired")

    @rule(requeue=st.booleans())
    def restart(self, requeue: bool) -> None:
        self.store.close()
        self.store = self.open()
        leased = [(each.fence, key) for key, each in self.model.rollouts.items() if each.state == "leased"]
        if requeue:
            assert self.store.requeue() == len(leased)
        else:
            self.store.recover(now=self.now, lease_s=LEASE_S)
        for _fence, key in sorted(leased):
            if requeue:
                self.model.end_attempt(key, "requeued")
            else:
                self.model.rollouts[key].until = self.now + LEASE_S

    @invariant()
    def has_the_same_state(self) -> None:
        states = [each.state for each in self.model.rollouts.values()]
        assert {state: states.count(state) for state in State} == self.store.count()
        leased = [each.until for each in self.model.rollouts.values() if each.state == "leased"]
        assert self.store.next_expiry() == min(leased, default=None)
        assert len(leased) == len(self.store.leases())

    @invariant()
    def has_one_result_for_each_end(self) -> None:
        results = self.store.results()
        assert results == [self.store.result_of(*key) for key in self.model.ends]
        found = [(each.uid, each.global_step, each.rollout_n) for each in results]
        assert self.model.ends == found
        assert len(set(found)) == len(found)
        for key, result in zip(found, results, strict=True):
            rollout = self.model.rollouts[key]
            assert (rollout.state, rollout.attempts) == (result.state, result.attempt)
            assert rollout.score == result.score
            owner = {"failed": "agent", "completed": None}.get(rollout.ending, "infra")
            assert owner == result.owner


TestStore = StoreMachine.TestCase
