"""The store survives kills and other processes, and refuses bad input."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from turnwise.errors import DataError
from turnwise_gateway.control.scores import Verdict
from turnwise_task_pool.driver.offer_store import OfferStore
from turnwise_task_pool.pool.sqlite_store import SqliteStore
from turnwise_task_pool.pool.store import PoolError, PoolTask, State

SITE = Path(__file__).with_name("crash_site.py")


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    """An empty store."""
    return SqliteStore(tmp_path / "pool.sqlite")


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_statement_loses_and_doubles_nothing(tmp_path: Path, stride: int) -> None:
    """A pool is killed before each of its SQL statements in turn; the next one finishes every rollout once."""
    done = subprocess.run([sys.executable, SITE, tmp_path, str(stride)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 165 // stride


@pytest.mark.parametrize("synchronous", ["NORMAL", "FULL"])
def test_the_file_is_synchronised_as_asked(tmp_path: Path, synchronous: str) -> None:
    """The database uses the write-ahead log and the chosen level."""
    store = SqliteStore(tmp_path / "pool.sqlite", synchronous=synchronous)

    assert store._row("PRAGMA journal_mode") == ("wal",)
    assert store._row("PRAGMA synchronous") == ({"NORMAL": 1, "FULL": 2}[synchronous],)


def test_members_of_a_group_are_handed_out_together(store: SqliteStore) -> None:
    """A member that is ready again comes before later groups, and one that is added late joins its group."""
    for uid, rollouts in (("a", [0, 1]), ("b", [0, 1]), ("a", [2])):
        store.put(PoolTask(uid=uid, rollouts=rollouts), capacity=8)
    first = store.lease("w", now=0.0, lease_s=9.0)
    store.fail(first.id, first.fence, now=0.0, owner="agent", reason="")

    leases = [store.lease("w", now=0.0, lease_s=9.0) for _ in range(5)]

    assert [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)] == [(each.uid, each.rollout_n) for each in leases]


def test_a_late_score_before_the_next_lease_changes_nothing(store: SqliteStore) -> None:
    """Between the end of a lease and the next one the rollout is ready, and stays so; afterwards it stays leased."""
    store.put(PoolTask(uid="a"), capacity=1)
    lease = store.lease("w", now=0.0, lease_s=9.0)

    def report() -> Verdict:
        return store.complete(lease.id, lease.fence, now=9.0, score=1.0)

    assert report() is Verdict.LATE  # no one has ended the lease yet
    assert [lease] == store.expire(now=9.0)
    assert report() is Verdict.LATE
    successor = store.lease("w", now=9.0, lease_s=9.0)
    assert report() is Verdict.LATE
    assert store.results() == []
    assert store.complete(successor.id, successor.fence, now=9.0, score=0.5) is Verdict.ACCEPTED
    assert report() is Verdict.LATE
    assert [0.5] == [each.score for each in store.results()]


def test_a_task_that_was_put_again_changes_nothing(store: SqliteStore) -> None:
    """A producer that does not know whether its task arrived puts it again, also after its end and when it is full."""
    task = PoolTask(uid="a", rollouts=[0, 1], content={"q": 1})
    assert store.put(task, capacity=2)
    lease = store.lease("w", now=0.0, lease_s=9.0)
    store.complete(lease.id, lease.fence, now=0.0, score=1.0)

    assert store.put(task, capacity=2)

    assert {"ready": 1, "leased": 0, "done": 1, "dead": 0} == store.count()
    with pytest.raises(PoolError, match="another content"):
        store.put(PoolTask(uid="a", content={"q": 2}), capacity=9)
    with pytest.raises(PoolError, match="never fit"):
        store.put(PoolTask(uid="b", rollouts=range(3)), capacity=2)


def test_a_full_store_takes_nothing(store: SqliteStore) -> None:
    """Ready and leased rollouts count; a group comes in whole or not at all."""
    assert store.put(PoolTask(uid="a", rollouts=range(2)), capacity=3)
    store.lease("w", now=0.0, lease_s=9.0)

    assert not store.put(PoolTask(uid="b", rollouts=range(2)), capacity=3)

    assert store.count()[State.READY] == 1


def test_fences_of_a_new_file_follow_those_of_an_earlier_one(tmp_path: Path, store: SqliteStore) -> None:
    """An agent with a lease of another file ends no lease of this one."""
    successor = SqliteStore(tmp_path / "successor.sqlite", first_fence=1000)
    leases = []
    for each in (store, successor):
        each.put(PoolTask(uid="a"), capacity=1)
        leases.append(each.lease("w", now=0.0, lease_s=9.0))

    assert [1, 1001] == [lease.fence for lease in leases]
    assert successor.complete(leases[0].id, leases[0].fence, now=0.0, score=1.0) is Verdict.LATE
    assert successor.complete(leases[1].id, leases[1].fence, now=0.0, score=1.0) is Verdict.ACCEPTED


def test_scores_that_are_not_finite_are_refused(store: SqliteStore) -> None:
    """They would not be JSON; the lease stays as it is."""
    store.put(PoolTask(uid="a"), capacity=1)
    lease = store.lease("w", now=0.0, lease_s=9.0)

    with pytest.raises(ValueError, match="JSON"):
        store.complete(lease.id, lease.fence, now=0.0, score=float("nan"))

    assert [lease] == store.leases()


def test_other_files_are_refused(tmp_path: Path, store: SqliteStore) -> None:
    """A file of a later format is not read, and a missing one is not created."""
    store._run("PRAGMA user_version=9")
    store.close()

    with pytest.raises(DataError, match="format 9"):
        SqliteStore(store.path)
    with pytest.raises(DataError, match="no such file"):
        SqliteStore.open(tmp_path / "missing")


def finish_rollouts(path: Path, name: str) -> None:
    """Lease and complete rollouts until there is none; runs in a process."""
    store = SqliteStore(path)
    while (lease := store.lease(name, now=0.0, lease_s=9.0)) is not None:
        assert store.complete(lease.id, lease.fence, now=0.0, score=1.0) is Verdict.ACCEPTED


def test_two_processes_share_a_file(store: SqliteStore) -> None:
    """Each rollout is leased by one of them."""
    for number in range(30):
        store.put(PoolTask(uid=str(number), rollouts=range(4)), capacity=120)
    seen = store.changes()
    context = get_context("spawn")
    workers = [context.Process(target=finish_rollouts, args=(store.path, name)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert [0, 0] == [worker.exitcode for worker in workers]
    assert {(1.0, 1)} == {(each.score, each.attempt) for each in store.results()}
    assert len(store.results()) == 120
    assert store.changes() != seen


def test_an_offer_store_ends_and_reopens_rollouts(tmp_path: Path) -> None:
    """Rollouts of a run that died are dead; put again, they have all attempts and no result, and fences continue."""
    store = OfferStore(tmp_path / "pool.sqlite", max_attempts=2)
    for uid in "abc":
        store.put(PoolTask(uid=uid), capacity=9)
    lease, done = (store.lease("w", now=0.0, lease_s=9.0) for _ in range(2))
    store.complete(done.id, done.fence, now=0.0, score=1.0)
    store.close()

    again = OfferStore(tmp_path / "pool.sqlite", max_attempts=2)
    assert ["done", "dead", "dead"] == [str(each.state) for each in again.results()]
    assert Verdict.LATE is again.complete(lease.id, lease.fence, now=0.0, score=1.0)
    assert again.put(PoolTask(uid="a"), capacity=1)
    assert not again.put(PoolTask(uid="c"), capacity=1)
    fresh = again.lease("w", now=0.0, lease_s=9.0)
    assert (1, "a") == (fresh.attempt, fresh.uid)
    assert fresh.fence > done.fence
    assert ["b", "c"] == [each.uid for each in again.results()]
    again.close()
