"""
Kills a process before the SQL statements of a pool's life, and checks the files that it leaves.

Run as a program, so that it forks without threads. `python crash_site.py FOLDER 3` kills at every third statement, and
prints how often it did.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path

from turnwise_gateway.control.scores import Verdict
from turnwise_task_pool.pool.sqlite_store import SqliteStore
from turnwise_task_pool.pool.store import Lease, PoolTask

TASKS = [PoolTask(uid=uid, rollouts=range(2), content={"question": uid}) for uid in "abc"]
LEASE_S = 10.0
DEAD = ("a", 1)
"""The rollout that no agent finishes."""


class Life:
    """Puts tasks, and plays agents that succeed, fail and vanish; `reports` keeps the scores that a pool confirmed."""

    def __init__(self, folder: Path, kill_at: int | None) -> None:
        self.num_statements = 0
        self.kill_at = kill_at
        self.now = 0.0
        self.reports = folder / "reports"
        self.store = SqliteStore(folder / "pool.sqlite", max_attempts=2, trace=self.trace)

    def trace(self, _statement: str) -> None:
        self.num_statements += 1
        if self.num_statements == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self, kept: dict[tuple[str, int], Lease]) -> None:
        """Continue until every rollout has ended; the agents of a killed pool repeat their last news first."""
        for lease in kept.values():
            self.report(lease)
        self.store.recover(now=self.now, lease_s=LEASE_S)
        for task in TASKS:
            while not self.store.put(task, capacity=4):
                self.finish_one()
        while self.store.count()["ready"] or self.store.count()["leased"]:
            self.finish_one()

    def finish_one(self) -> None:
        lease = self.store.lease("agent", now=self.now, lease_s=LEASE_S)
        if lease is None or (lease.uid, lease.rollout_n) == DEAD:
            self.now += LEASE_S  # the agent vanished
            self.store.expire(now=self.now)
        elif lease.rollout_n == 0 and lease.attempt == 1:
            self.store.fail(lease.id, lease.fence, now=self.now, owner="agent", reason="tried")
        else:
            self.store.renew(lease.id, lease.fence, now=self.now, lease_s=LEASE_S)
            self.report(lease)

    def report(self, lease: Lease) -> None:
        score = float(lease.fence)
        verdict = self.store.complete(lease.id, lease.fence, now=self.now, score=score)
        if verdict is Verdict.ACCEPTED:
            with self.reports.open("a") as file:  # the agent knows that its score counts
                file.write(f"{lease.uid} {lease.rollout_n} {score}\n")


def check_end(folder: Path) -> None:
    """Every rollout has one result, and every score that a pool confirmed is the result."""
    store = SqliteStore.open(folder / "pool.sqlite")
    results = {(each.uid, each.rollout_n): each for each in store.results()}
    assert len(store.results()) == len(results)
    assert {(task.uid, n) for task in TASKS for n in task.rollouts} == results.keys()
    confirmed = [line.split() for line in (folder / "reports").read_text().splitlines()]
    assert len({(uid, n) for uid, n, _score in confirmed}) == len(confirmed), "a score was confirmed twice"
    for uid, n, score in confirmed:
        assert results[uid, int(n)].score == float(score)
    # A pool that died between its commit and its answer has a score that no agent saw confirmed: at most one.
    assert len(results) - len(confirmed) - sum(each.state == "dead" for each in results.values()) <= 1
    assert results[DEAD].state == "dead"
    assert results[DEAD].owner == "infra"
    store.close()


def live_through(folder: Path, kill_at: int) -> bool:
    """Kill a pool at a statement, continue with another one, and check the end; False when it ended before."""
    folder.mkdir()
    child = os.fork()
    if child == 0:
        life = Life(folder, kill_at)
        life.run({})
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0
    life = Life(folder, None)
    life.run({(each.uid, each.rollout_n): each for each in life.store.leases() if (each.uid, each.rollout_n) != DEAD})
    life.store.close()
    check_end(folder)
    return killed


if __name__ == "__main__":
    place, stride = Path(sys.argv[1]), int(sys.argv[2])
    for index in count():
        if not live_through(place / str(index), 1 + index * stride):
            print(index)
            break
