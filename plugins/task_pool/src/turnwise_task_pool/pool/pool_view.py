"""Reads the file of a task pool without changing it, also while a run writes to it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from attrs import frozen

from turnwise.errors import DataError
from turnwise_task_pool.pool.sqlite_check import check_pool
from turnwise_task_pool.pool.sqlite_rows import FROM_RESULT, RESULT_COLUMNS, read_result
from turnwise_task_pool.pool.store import PoolResult, State

_ROLLOUTS = (
    "SELECT uid, global_step, rollout.rollout_n, rollout.state, attempt, worker, until, coalesce(reason, '') "
    "FROM rollout JOIN task_group ON task_group.number = rollout.group_number "
    "LEFT JOIN result USING (group_number, rollout_n) ORDER BY group_number, rollout_n"
)


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


@frozen
class PoolView:
    """
    The rollouts and results of a pool file.

    Attributes:
        path: of the file.

    Raises:
        DataError: the file is missing, or no task pool of this version; every method may raise it too.
    """

    path: Path

    def __attrs_post_init__(self) -> None:
        with self._open() as database:
            check_pool(database, self.path)

    def rollouts(self) -> list[RolloutView]:
        """Return all rollouts, in the order in which they are handed out."""
        now = time.time()
        with self._open() as database:
            rows = database.execute(_ROLLOUTS).fetchall()
        return [
            RolloutView(
                uid=uid,
                global_step=step,
                rollout_n=rollout_n,
                state=State(state),
                attempt=attempt,
                worker=worker,
                expires_in_s=None if until is None else round(until - now, 1),
                reason=reason,
            )
            for uid, step, rollout_n, state, attempt, worker, until, reason in rows
        ]

    def results(self) -> list[PoolResult]:
        """Return all results, in the order of their arrival."""
        with self._open() as database:
            rows = database.execute(f"SELECT {RESULT_COLUMNS} {FROM_RESULT} ORDER BY result.number").fetchall()
        return [read_result(row) for row in rows]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if not self.path.is_file():
            raise DataError(f"{self.path}: there is no such file")
        try:
            with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=30)) as database:
                yield database
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self.path}: cannot be read as a task pool: {error}") from error
