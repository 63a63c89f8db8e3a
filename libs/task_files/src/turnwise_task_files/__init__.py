"""
Tasks from files and from task sources, of a run's config or of one file, and conversations for fine-tuning.

Names are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from turnwise_task_files.conversations import Conversation, check_tools, read_conversations
    from turnwise_task_files.rows import read_tasks
    from turnwise_task_files.source_texts import parse_text, split_options
    from turnwise_task_files.sources import describe_sources, load_sources, load_tasks
    from turnwise_task_files.task_source import FileSource, TaskSource

__all__ = [
    "Conversation",
    "FileSource",
    "TaskSource",
    "check_tools",
    "describe_sources",
    "load_sources",
    "load_tasks",
    "parse_text",
    "read_conversations",
    "read_tasks",
    "split_options",
]

_MODULES: Final = {
    "Conversation": "conversations",
    "FileSource": "task_source",
    "TaskSource": "task_source",
    "check_tools": "conversations",
    "describe_sources": "sources",
    "load_sources": "sources",
    "load_tasks": "sources",
    "parse_text": "source_texts",
    "read_conversations": "conversations",
    "read_tasks": "rows",
    "split_options": "source_texts",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
