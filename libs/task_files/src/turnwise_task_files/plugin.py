"""Adds the kind `task_sources`, which other plugins register."""

from __future__ import annotations

from turnwise import HookSpecs, hookimpl
from turnwise_task_files.task_source import TaskSource, register_task_sources


@hookimpl
def add_hookspecs(specs: HookSpecs) -> None:
    """Add the hook of task sources."""
    specs.add(register_task_sources, part="task source", contract=TaskSource)
