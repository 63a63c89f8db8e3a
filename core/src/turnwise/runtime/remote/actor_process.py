"""Settings of a process that runs one actor and nothing else."""

from __future__ import annotations

from turnwise.collector import freeze_start
from turnwise.episode.containment import contain_exits


def prepare_process() -> None:
    """
    Keep tasks from ending the event loop, and garbage collections from visiting the objects of the start.

    An actor calls it on its event loop when it has built its parts.
    """
    contain_exits()
    freeze_start()
