"""The tables of `SqliteStore`, and their rows as objects."""

from __future__ import annotations

import json
from typing import Any

from turnwise_task_pool.pool.store import Lease, PoolError, PoolResult, RolloutView, State

SCHEMA_VERSION = 3
# A group keeps its number, so rollouts that become ready again come before those of later groups.
SCHEMA = """
CREATE TABLE IF NOT EXISTS task_group (
    number INTEGER PRIMARY KEY,
    uid TEXT NOT NULL,
    global_step INTEGER NOT NULL,
    content TEXT NOT NULL,
    UNIQUE (uid, global_step)
);
CREATE TABLE IF NOT EXISTS rollout (
    group_number INTEGER NOT NULL REFERENCES task_group (number),
    rollout_n INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'ready',
    fence INTEGER NOT NULL DEFAULT 0,
    attempt INTEGER NOT NULL DEFAULT 0,
    worker TEXT NOT NULL DEFAULT '',
    until REAL,
    ending TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (group_number, rollout_n)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS rollout_state ON rollout (state, group_number, rollout_n);
CREATE INDEX IF NOT EXISTS rollout_until ON rollout (until) WHERE state = 'leased';
CREATE TABLE IF NOT EXISTS result (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    group_number INTEGER NOT NULL,
    rollout_n INTEGER NOT NULL,
    state TEXT NOT NULL,
    score TEXT NOT NULL,
    metrics TEXT NOT NULL,
    owner TEXT,
    reason TEXT NOT NULL,
    UNIQUE (group_number, rollout_n)
);
CREATE TABLE IF NOT EXISTS last_fence (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), fence INTEGER NOT NULL);
"""

LEASE_COLUMNS = "group_number, rollout_n, fence, attempt, worker, until, uid, global_step, content"
FROM_ROLLOUT = "FROM rollout JOIN task_group ON task_group.number = rollout.group_number"
ROLLOUT_COLUMNS = "uid, global_step, rollout.rollout_n, rollout.state, attempt, worker, until, coalesce(reason, '')"
RESULT_COLUMNS = (
    "result.number, uid, global_step, rollout_n, result.state, score, metrics, owner, reason, attempt, fence"
)
FROM_RESULT = (
    "FROM result JOIN task_group ON task_group.number = result.group_number "
    "JOIN rollout USING (group_number, rollout_n)"
)


def to_json(value: object) -> str:
    """Return a JSON text that is equal for equal values; `ValueError` for a number that is not finite."""
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))


def read_lease(row: tuple[Any, ...]) -> Lease:
    """Return the lease of a row of `LEASE_COLUMNS`."""
    group, rollout_n, fence, attempt, worker, until, uid, step, content = row
    return Lease(
        id=f"{group}-{rollout_n}-{fence}",
        fence=fence,
        attempt=attempt,
        worker=worker,
        uid=uid,
        global_step=step,
        rollout_n=rollout_n,
        content=json.loads(content),
        until=until,
    )


def parse_name(lease_id: str) -> tuple[int, int, int] | None:
    """Return group, rollout and fence of a lease's name; None for a name that no lease has."""
    parts = lease_id.split("-")
    # SQLite holds 64 bits; a longer number is no lease of ours.
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
        return None
    group, rollout_n, fence = map(int, parts)
    return group, rollout_n, fence


def key_of(lease: Lease) -> tuple[int, int]:
    """Return group and rollout of a lease."""
    parts = parse_name(lease.id)
    if parts is None:
        raise PoolError(f"no lease has the name {lease.id!r}")
    return parts[0], parts[1]


def read_rollout(row: tuple[Any, ...], now: float) -> RolloutView:
    """Return the rollout of a row of `ROLLOUT_COLUMNS` at a time."""
    uid, step, rollout_n, state, attempt, worker, until, reason = row
    return RolloutView(
        uid=uid,
        global_step=step,
        rollout_n=rollout_n,
        state=State(state),
        attempt=attempt,
        worker=worker,
        expires_in_s=None if until is None else round(until - now, 1),
        reason=reason,
    )


def read_result(row: tuple[Any, ...]) -> PoolResult:
    """Return the result of a row of `RESULT_COLUMNS`."""
    number, uid, step, rollout_n, state, score, metrics, owner, reason, attempt, fence = row
    return PoolResult(
        number=number,
        uid=uid,
        global_step=step,
        rollout_n=rollout_n,
        state=State(state),
        score=json.loads(score),
        metrics=json.loads(metrics),
        owner=owner,
        reason=reason,
        attempt=attempt,
        fence=fence,
    )
