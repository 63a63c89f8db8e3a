"""Reads the columns of a task that describe its user."""

from __future__ import annotations

from collections.abc import Mapping

from turnwise import Task


def find_column(task: Task, name: str) -> object:
    """Return a column of a task, or the value of the same name in its `extra_info`, or None."""
    if name in task.extra:
        return task.extra[name]
    extra_info = task.extra.get("extra_info")
    return extra_info.get(name) if isinstance(extra_info, Mapping) else None
