"""Finds damaged and edited files of task pools, before anything relies on them."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from turnwise.errors import DataError
from turnwise_task_pool.pool.sqlite_rows import SCHEMA_VERSION

_NUMBERS = ("rollout_n", "attempt", "fence")
_ENDED = "('done', 'dead')"
_FAULTS: Final = {
    "a task has no JSON object as its content": (
        "SELECT 1 FROM task_group WHERE NOT CASE WHEN json_valid(content) THEN json_type(content) = 'object' END "
        "OR NOT json_valid(content)"
    ),
    "a rollout belongs to no task": "SELECT 1 FROM rollout WHERE group_number NOT IN (SELECT number FROM task_group)",
    "a rollout has an unknown state": f"SELECT 1 FROM rollout WHERE state NOT IN ('ready', 'leased', {_ENDED[1:]}",
    "a rollout has a number that is none": "SELECT 1 FROM rollout WHERE "
    + " OR ".join(f"typeof({name}) != 'integer' OR {name} < 0" for name in _NUMBERS),
    "a lease has no end": "SELECT 1 FROM rollout WHERE state = 'leased' AND typeof(until) NOT IN ('real', 'integer')",
    "a fence is above the last one": (
        "SELECT 1 FROM rollout WHERE fence > coalesce((SELECT fence FROM last_fence), -1) AND fence > 0"
    ),
    "an ended rollout has no result": (
        f"SELECT 1 FROM rollout LEFT JOIN result USING (group_number, rollout_n) "
        f"WHERE rollout.state IN {_ENDED} AND result.state IS NOT rollout.state"
    ),
    "a result belongs to no ended rollout": (
        "SELECT 1 FROM result LEFT JOIN rollout USING (group_number, rollout_n) WHERE rollout.state IS NOT result.state"
    ),
    "a result has no JSON as its score or metrics": (
        "SELECT 1 FROM result WHERE NOT json_valid(score) OR NOT json_valid(metrics) "
        "OR CASE WHEN json_valid(metrics) THEN json_type(metrics) != 'object' END"
    ),
}
"""Queries that find a row in a file that this program did not write, each with the fault."""


def check_pool(database: sqlite3.Connection, path: Path) -> None:
    """
    Check the pages and the rows of a task pool.

    Raises:
        DataError: it is no pool of this version, it is damaged, or another program has changed it.
    """
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'task_group'").fetchone() is None:
        raise DataError(f"{path}: not a task pool")
    if version != SCHEMA_VERSION:
        raise DataError(f"{path}: a pool of format {version}; this version reads {SCHEMA_VERSION}")
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise DataError(f"{path}: the task pool is damaged: {found.splitlines()[-1]}")
    for fault, query in _FAULTS.items():
        if database.execute(f"{query} LIMIT 1").fetchone() is not None:
            raise DataError(f"{path}: the task pool was changed by another program: {fault}")
