"""
The file of a pool whose tasks are the episodes of a run.

The file may come from an earlier run whose driver died. Sessions die with their process, so an episode that is offered
again has all its attempts, and its earlier result is removed; fences continue, so late news of the dead leases change
nothing.
"""

from __future__ import annotations

from attrs import define

from turnwise_task_pool.pool.sqlite_rows import FROM_ROLLOUT
from turnwise_task_pool.pool.sqlite_store import SqliteStore
from turnwise_task_pool.pool.store import PoolTask, State


@define(eq=False)
class OfferStore(SqliteStore):
    """A store whose rollouts end with their run, and whose ended rollouts may be put again."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        with self._transaction():
            for group, rollout_n in self._all(
                "SELECT group_number, rollout_n FROM rollout WHERE state IN (?, ?)", *_OPEN
            ):
                self._end((group, rollout_n), State.DEAD, "abandoned", ("null", "{}"), "infra", "its run died")

    def put(self, task: PoolTask, *, capacity: int) -> bool:
        """Add the rollout of an episode, which has no result any more if it had one; else as `TaskStore.put`."""
        (rollout_n,) = task.rollouts
        where = "WHERE uid = ? AND global_step = ? AND rollout_n = ?"
        with self._transaction():
            found = self._one(
                f"SELECT group_number, rollout_n, state {FROM_ROLLOUT} {where}", task.uid, task.global_step, rollout_n
            )
            if found is None:
                return self._add(task, capacity)
            if found[2] in _OPEN:
                return True
            if not self._has_room(1, capacity):
                return False
            self._reopen((found[0], found[1]))
        return True


_OPEN = (State.READY, State.LEASED)
