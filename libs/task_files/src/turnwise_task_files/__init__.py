"""Tasks from files, of a run's config or of one file, and conversations for fine-tuning."""

from __future__ import annotations

from turnwise_task_files.conversations import Conversation, check_tools, read_conversations
from turnwise_task_files.rows import read_tasks
from turnwise_task_files.sources import load_sources, load_tasks

__all__ = ["Conversation", "check_tools", "load_sources", "load_tasks", "read_conversations", "read_tasks"]
