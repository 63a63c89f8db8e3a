"""Tasks from files: of a run's config, or of one file."""

from __future__ import annotations

from turnwise_task_files.rows import read_tasks
from turnwise_task_files.sources import load_sources, load_tasks

__all__ = ["load_sources", "load_tasks", "read_tasks"]
