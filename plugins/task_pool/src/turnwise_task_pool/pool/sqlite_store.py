"""
A task store in one SQLite file.

The write-ahead log lets readers work beside the writer. With `synchronous=NORMAL` a killed process loses nothing, and
a machine that loses power may lose its last transactions, all of them whole; `FULL` keeps these too, at about a sixth
of the speed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal, Self

from attrs import define, field

from turnwise.errors import DataError, Owner
from turnwise_gateway.control.scores import Verdict
from turnwise_task_pool.pool.sqlite_check import check_pool
from turnwise_task_pool.pool.sqlite_rows import (
    FROM_RESULT,
    FROM_ROLLOUT,
    LEASE_COLUMNS,
    RESULT_COLUMNS,
    ROLLOUT_COLUMNS,
    SCHEMA,
    SCHEMA_VERSION,
    key_of,
    parse_name,
    read_lease,
    read_result,
    read_rollout,
    to_json,
)
from turnwise_task_pool.pool.store import Lease, PoolError, PoolResult, PoolTask, RolloutView, State


@define(eq=False)
class SqliteStore:
    """
    A `TaskStore` in a file; several processes may open it.

    Attributes:
        path: of the file, which is created if it is missing.
        max_attempts: leases of a rollout before it is dead.
        synchronous: `NORMAL`, or `FULL` to survive a loss of power.
        first_fence: the fences of a new file are larger. Agents that may still have leases of an earlier file need
            larger ones than theirs.
        trace: called with each SQL statement before it runs.
        reads_only: leave the file as it is; it must exist.

    Raises:
        DataError: the file cannot be used as a task pool.
    """

    path: Path = field(converter=Path)
    max_attempts: int = 3
    synchronous: Literal["NORMAL", "FULL"] = "NORMAL"
    first_fence: int = 0
    trace: Callable[[str], object] | None = None
    reads_only: bool = False
    _database: sqlite3.Connection = field(init=False)

    def __attrs_post_init__(self) -> None:
        if self.max_attempts < 1:
            raise PoolError(f"'max_attempts' must be at least 1: {self.max_attempts}")
        name = f"{self.path.absolute().as_uri()}?mode=ro" if self.reads_only else self.path
        # The thread that opens the store is not the one that writes; `isolation_level=None` leaves transactions to us.
        self._database = sqlite3.connect(
            name, timeout=30, isolation_level=None, check_same_thread=False, uri=self.reads_only
        )
        self._database.set_trace_callback(self.trace)
        try:
            if self.reads_only:
                check_pool(self._database, self.path)
            else:
                self._database.execute("PRAGMA journal_mode=WAL")
                self._database.execute(f"PRAGMA synchronous={self.synchronous}")
                self._create_tables()
        except sqlite3.DatabaseError as error:
            self.close()
            raise DataError(f"{self.path}: cannot be used as a task pool: {error}") from error
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: str | Path, *, reads_only: bool = False) -> Self:
        """
        Open a file that must exist.

        Raises:
            DataError: there is no file, or it cannot be used as a task pool.
        """
        if not Path(path).is_file():
            raise DataError(f"{path}: there is no such file")
        return cls(path, reads_only=reads_only)

    @classmethod
    @contextmanager
    def reading(cls, path: Path) -> Iterator[Self]:
        """
        Open a file to read it inside the `with` statement, also while a run writes to it.

        Raises:
            DataError: as for `open`; also when a later read fails.
        """
        try:
            with closing(cls.open(path, reads_only=True)) as store:
                yield store
        except sqlite3.DatabaseError as error:
            raise DataError(f"{path}: cannot be read as a task pool: {error}") from error

    def _create_tables(self) -> None:
        with self._transaction():
            if self._one("SELECT 1 FROM sqlite_master"):
                check_pool(self._database, self.path)
                return
            for statement in SCHEMA.split(";\n"):
                self._database.execute(statement)
            self._run("INSERT OR IGNORE INTO last_fence VALUES (1, ?)", self.first_fence)
            self._database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        # IMMEDIATE takes the lock of writers before anything is read, so no other process changes it in between.
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # a full disk ends the transaction by itself
                self._database.execute("ROLLBACK")
            raise

    def put(self, task: PoolTask, *, capacity: int) -> bool:
        if len(set(task.rollouts)) > capacity:
            raise PoolError(
                f"{len(set(task.rollouts))} rollouts of task {task.uid!r} never fit the capacity {capacity}"
            )
        with self._transaction():
            return self._add(task, capacity)

    def _add(self, task: PoolTask, capacity: int) -> bool:
        content, key = to_json(task.content), (task.uid, task.global_step)
        found = self._one("SELECT number, content FROM task_group WHERE uid = ? AND global_step = ?", *key)
        if found and found[1] != content:
            raise PoolError(f"task {task.uid!r} of step {task.global_step} is in the pool with another content")
        known = self._all("SELECT rollout_n FROM rollout WHERE group_number = ?", found[0]) if found else []
        new = sorted(set(task.rollouts) - {rollout_n for (rollout_n,) in known})
        if new and not self._has_room(len(new), capacity):
            return False
        insert = "INSERT INTO task_group (uid, global_step, content) VALUES (?, ?, ?)"
        number = found[0] if found else self._database.execute(insert, (*key, content)).lastrowid
        for rollout_n in new:
            self._run("INSERT INTO rollout (group_number, rollout_n) VALUES (?, ?)", number, rollout_n)
        return True

    def _has_room(self, num_new: int, capacity: int) -> bool:
        (num_open,) = self._row("SELECT count(*) FROM rollout WHERE state IN ('ready', 'leased')")
        return bool(num_open + num_new <= capacity)

    def lease(self, worker: str, *, now: float, lease_s: float) -> Lease | None:
        with self._transaction():
            first = self._one(
                "SELECT group_number, rollout_n FROM rollout WHERE state = 'ready' "
                "ORDER BY group_number, rollout_n LIMIT 1"
            )
            if first is None:
                return None
            self._run("UPDATE last_fence SET fence = fence + 1")
            self._run(
                "UPDATE rollout SET state = 'leased', attempt = attempt + 1, worker = ?, until = ?, ending = '', "
                "fence = (SELECT fence FROM last_fence) WHERE group_number = ? AND rollout_n = ?",
                *(worker, now + lease_s, *first),
            )
            where = "WHERE group_number = ? AND rollout_n = ?"
            return read_lease(self._row(f"SELECT {LEASE_COLUMNS} {FROM_ROLLOUT} {where}", *first))

    def withdraw(self, lease: Lease) -> None:
        group, rollout_n, fence = parse_name(lease.id) or (0, 0, 0)
        with self._transaction():
            self._run(
                "UPDATE rollout SET state = 'ready', attempt = attempt - 1, until = NULL, ending = 'withdrawn' "
                "WHERE group_number = ? AND rollout_n = ? AND fence = ? AND state = 'leased'",
                *(group, rollout_n, fence),
            )

    def renew(self, lease_id: str, fence: int, *, now: float, lease_s: float) -> Verdict:
        with self._transaction():
            verdict, key = self._judge(lease_id, fence, now)
            if verdict is Verdict.ACCEPTED:
                self._run("UPDATE rollout SET until = ? WHERE group_number = ? AND rollout_n = ?", now + lease_s, *key)
        return verdict if verdict in (Verdict.ACCEPTED, Verdict.UNKNOWN) else Verdict.LATE

    def complete(
        self, lease_id: str, fence: int, *, now: float, score: object = None, metrics: Mapping[str, float] | None = None
    ) -> Verdict:
        texts = to_json(score), to_json(metrics or {})
        with self._transaction():
            verdict, key = self._judge(lease_id, fence, now)
            if verdict is Verdict.REPEATED:
                where = "WHERE state = 'done' AND group_number = ? AND rollout_n = ?"
                before = self._one(f"SELECT score, metrics FROM result {where}", *key)
                return Verdict.LATE if before is None else Verdict.REPEATED if before == texts else Verdict.CONFLICT
            if verdict is Verdict.ACCEPTED:
                self._end(key, State.DONE, "completed", texts)
        return verdict

    def fail(self, lease_id: str, fence: int, *, now: float, owner: Owner, reason: str) -> Verdict:
        with self._transaction():
            verdict, key = self._judge(lease_id, fence, now)
            if verdict is Verdict.REPEATED:
                ending = self._row("SELECT ending FROM rollout WHERE group_number = ? AND rollout_n = ?", *key)
                return Verdict.REPEATED if ending == ("failed",) else Verdict.LATE
            if verdict is Verdict.ACCEPTED:
                self._give_up(key, "failed", owner, reason)
        return verdict

    def expire(self, *, now: float) -> list[Lease]:
        with self._transaction():
            where = "WHERE state = 'leased' AND until <= ? ORDER BY fence"
            ended = [read_lease(row) for row in self._all(f"SELECT {LEASE_COLUMNS} {FROM_ROLLOUT} {where}", now)]
            for lease in ended:
                self._expire(lease)
        return ended

    def next_expiry(self) -> float | None:
        (until,) = self._row("SELECT min(until) FROM rollout WHERE state = 'leased'")
        return None if until is None else float(until)

    def requeue(self) -> int:
        with self._transaction():
            ended = self.leases()
            for lease in ended:
                self._give_up(key_of(lease), "requeued", "infra", "the process of its session died")
        return len(ended)

    def recover(self, *, now: float, lease_s: float) -> None:
        with self._transaction():
            self._run("UPDATE rollout SET until = ? WHERE state = 'leased'", now + lease_s)

    def count(self) -> dict[State, int]:
        found = dict(self._all("SELECT state, count(*) FROM rollout GROUP BY state"))
        return {state: found.get(state, 0) for state in State}

    def is_empty(self) -> bool:
        return not self._row("SELECT EXISTS (SELECT 1 FROM rollout WHERE state IN ('ready', 'leased'))")[0]

    def rollouts(self, *, now: float) -> list[RolloutView]:
        """Return all rollouts, in the order in which they are handed out."""
        query = f"{FROM_ROLLOUT} LEFT JOIN result USING (group_number, rollout_n) ORDER BY group_number, rollout_n"
        return [read_rollout(row, now) for row in self._all(f"SELECT {ROLLOUT_COLUMNS} {query}")]

    def results(self, *, after: int = 0, limit: int = 1000) -> list[PoolResult]:
        where = "WHERE result.number > ? ORDER BY result.number LIMIT ?"
        rows = self._all(f"SELECT {RESULT_COLUMNS} {FROM_RESULT} {where}", after, limit)
        return [read_result(row) for row in rows]

    def result_of(self, uid: str, global_step: int, rollout_n: int) -> PoolResult | None:
        where = "WHERE uid = ? AND global_step = ? AND rollout_n = ?"
        row = self._one(f"SELECT {RESULT_COLUMNS} {FROM_RESULT} {where}", uid, global_step, rollout_n)
        return None if row is None else read_result(row)

    def is_leased(self, lease: Lease) -> bool:
        where = "WHERE group_number = ? AND rollout_n = ? AND fence = ? AND state = 'leased'"
        return self._one(f"SELECT 1 FROM rollout {where}", *key_of(lease), lease.fence) is not None

    def find_end(self, lease_id: str) -> Verdict:
        parts = parse_name(lease_id)
        where = "WHERE group_number = ? AND rollout_n = ? AND ? BETWEEN 1 AND (SELECT fence FROM last_fence)"
        return Verdict.LATE if parts and self._one(f"SELECT 1 FROM rollout {where}", *parts) else Verdict.UNKNOWN

    def abandon(self, uid: str, global_step: int, rollout_n: int, *, owner: Owner, reason: str) -> bool:
        where = "WHERE uid = ? AND global_step = ? AND rollout_n = ? AND state IN ('ready', 'leased')"
        with self._transaction():
            names = (uid, global_step, rollout_n)
            key = self._one(f"SELECT group_number, rollout_n {FROM_ROLLOUT} {where}", *names)
            if key is not None:
                self._end((key[0], key[1]), State.DEAD, "abandoned", ("null", "{}"), owner, reason)
        return key is not None

    def reopen_dead(self, uids: Collection[str] = ()) -> int:
        """Make dead rollouts ready again, with all their attempts and without a result; return how many there were."""
        with self._transaction():
            where = "WHERE state = 'dead'"
            found = self._all(f"SELECT group_number, rollout_n, uid {FROM_ROLLOUT} {where}")
            keys = [(group, rollout_n) for group, rollout_n, uid in found if not uids or uid in uids]
            for key in keys:
                self._reopen(key)
        return len(keys)

    def _reopen(self, key: tuple[int, int]) -> None:
        where, changes = "WHERE group_number = ? AND rollout_n = ?", "attempt = 0, until = NULL, ending = 'reopened'"
        self._run(f"DELETE FROM result {where}", *key)
        self._run(f"UPDATE rollout SET state = 'ready', {changes} {where}", *key)

    def leases(self) -> list[Lease]:
        where = "WHERE state = 'leased' ORDER BY fence"
        return [read_lease(row) for row in self._all(f"SELECT {LEASE_COLUMNS} {FROM_ROLLOUT} {where}")]

    def changes(self) -> int:
        return int(self._row("PRAGMA data_version")[0])

    def close(self) -> None:
        self._database.close()

    def _judge(self, lease_id: str, fence: int, now: float) -> tuple[Verdict, tuple[int, int]]:
        """Return `REPEATED` for a lease that ended by its own news, whose kind the caller compares."""
        parts = parse_name(lease_id)
        columns = "state, fence, until, ending"
        where = "WHERE group_number = ? AND rollout_n = ?"
        row = parts and self._one(f"SELECT {columns} FROM rollout {where}", *parts[:2])
        if not parts or row is None or not 1 <= parts[2] <= self._row("SELECT fence FROM last_fence")[0]:
            return Verdict.UNKNOWN, (0, 0)
        state, current, until, ending = row
        key = parts[0], parts[1]
        if parts[2] != current or fence != current:
            return Verdict.LATE, key
        if state == State.LEASED:
            # Time decides and not the next `expire`: a lease is over at the same moment whoever asks first.
            return (Verdict.ACCEPTED if now < until else Verdict.LATE), key
        return (Verdict.REPEATED if ending in ("completed", "failed") else Verdict.LATE), key

    def _expire(self, lease: Lease) -> None:
        reason = f"the lease of worker {lease.worker!r} expired"
        self._give_up(key_of(lease), "expired", "infra", reason)

    def _give_up(self, key: tuple[int, int], ending: str, owner: Owner, reason: str) -> None:
        (attempt,) = self._row("SELECT attempt FROM rollout WHERE group_number = ? AND rollout_n = ?", *key)
        if attempt >= self.max_attempts:
            self._end(key, State.DEAD, ending, ("null", "{}"), owner, reason)
        else:
            self._run(
                "UPDATE rollout SET state = 'ready', until = NULL, ending = ? WHERE group_number = ? AND rollout_n = ?",
                *(ending, *key),
            )

    def _end(
        self,
        key: tuple[int, int],
        state: State,
        ending: str,
        texts: tuple[str, str],
        owner: Owner | None = None,
        reason: str = "",
    ) -> None:
        where = "WHERE group_number = ? AND rollout_n = ?"
        self._run(f"UPDATE rollout SET state = ?, until = NULL, ending = ? {where}", state, ending, *key)
        self._run(
            "INSERT INTO result (group_number, rollout_n, state, score, metrics, owner, reason) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(*key, state, *texts, owner, reason),
        )

    def _run(self, statement: str, *values: object) -> None:
        self._database.execute(statement, values)

    def _all(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return self._database.execute(statement, values).fetchall()

    def _one(self, statement: str, *values: object) -> tuple[Any, ...] | None:
        row: tuple[object, ...] | None = self._database.execute(statement, values).fetchone()
        return row

    def _row(self, statement: str, *values: object) -> tuple[Any, ...]:
        """Return the only row of a query that always has one."""
        (row,) = self._all(statement, *values)
        return row
