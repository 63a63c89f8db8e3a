"""
Task sources: a kind of part that makes the rows of a run's tasks.

A path of tasks in a config, such as `data.path`, names one as `SOURCE:TEXT`. The source gets the text::

    @turnwise.hookimpl
    def register_task_sources(registry):
        registry.add("sums", Sums)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import turnwise
from turnwise import Registry


@runtime_checkable
class TaskSource(Protocol):
    """
    Makes rows from a text, as a file has them: mappings with the columns that `turnwise_task_files.rows` reads.

    The same text gives the same rows in every process, because an interrupted run reads them again when it resumes.
    """

    def describe(self, text: str) -> str:
        """
        Return one line about the rows of a text, without making them, such as `500 tasks of chain_sum, seed 1`.

        Raises:
            ConfigError, DataError: the text is wrong; one line that says what is allowed.
        """

    def rows(self, text: str) -> Iterable[Mapping[str, object]]:
        """
        Return the rows of a text, which hold JSON values. The run may stop to read before the last one.

        Raises:
            ConfigError, DataError: as `describe`.
        """


@runtime_checkable
class FileSource(TaskSource, Protocol):
    """A source whose texts name files or folders. Other sources lack the method."""

    def starting_from(self, folder: Path) -> TaskSource:
        """Return the source that reads relative paths from a folder: the one of the config."""


@turnwise.hookspec
def register_task_sources(registry: Registry[TaskSource]) -> None:
    """Add task sources; see `TaskSource`."""
