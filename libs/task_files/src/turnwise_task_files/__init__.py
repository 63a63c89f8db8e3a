"""
Tasks from files, of a run's config or of one file, and conversations for fine-tuning.

Names are imported when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from turnwise_task_files.conversations import Conversation, check_tools, read_conversations
    from turnwise_task_files.rows import read_tasks
    from turnwise_task_files.sources import load_sources, load_tasks

__all__ = ["Conversation", "check_tools", "load_sources", "load_tasks", "read_conversations", "read_tasks"]

_MODULES: Final = {
    "Conversation": "conversations",
    "check_tools": "conversations",
    "load_sources": "sources",
    "load_tasks": "sources",
    "read_conversations": "conversations",
    "read_tasks": "rows",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
