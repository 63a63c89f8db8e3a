"""The tasks of a run: the files and the task sources that the section `data` of its config names."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cached_property
from itertools import chain, count
from typing import Final

from attrs import evolve, frozen

from turnwise import RunConfig, Task
from turnwise.config.resolve import load_plugins
from turnwise.errors import ConfigError
from turnwise.options import DataColumn
from turnwise.plugin.host import Host
from turnwise_task_files.rows import read_tasks, take_tasks
from turnwise_task_files.source_texts import describe_rows, read_source_rows

_VERL_SINGLE_TURN: Final = "single_turn_agent"
"""The name that verl's data sets have for `single_turn`; a config may give it to another agent."""


def load_tasks(config: RunConfig) -> list[Task]:
    """Read the tasks of a run; see `load_sources`."""
    return [task for tasks in load_sources(config) for task in tasks]


def load_sources(config: RunConfig) -> list[list[Task]]:
    """
    Read the tasks of a run: its data set, or the validation set where `rollout.validation` is true.

    Returns:
        The tasks of each of `data.sources`, or of the only path. Their uids differ: a later source's name is added to
        a uid that an earlier one has, and then a number if another task has that uid too. Rows of verl's agent
        `single_turn_agent` name `single_turn`, unless the config has an agent of verl's name.

    Raises:
        ConfigError: `rollout.validation` is true, but the config names no validation set.
        DataError: a file cannot be read, a row does not fit, or a task source refuses its text.
        PluginError: a task source is unknown or fails.
    """
    data, reader = config.data, _Reader(config)
    if (path := _only_path(config)) is not None:
        return [reader.read(path, data.columns, data.limit, data.offset)]
    found = [
        reader.read(source.path, data.columns if source.columns is None else source.columns, source.limit)
        for source in data.sources
    ]
    # No new uid is the uid of a row, so which rows keep theirs does not depend on the new ones.
    taken = {task.uid for tasks in found for task in tasks}
    seen: set[str] = set()
    for source, tasks in zip(data.sources, found, strict=True):
        own = {task.uid for task in tasks}
        for n, task in enumerate(tasks):
            uid = _new_uid(f"{task.uid}-{source.label}", taken) if task.uid in seen else task.uid
            taken.add(uid)
            tasks[n] = evolve(task, uid=uid, data_source=task.data_source or source.label)
        seen.update(own)
    return found


def _new_uid(uid: str, taken: Set[str]) -> str:
    """Return the uid, or the first of uid-2, uid-3 and so on that no task has."""
    return next(each for each in chain([uid], (f"{uid}-{n}" for n in count(2))) if each not in taken)


def describe_sources(config: RunConfig) -> list[str]:
    """
    Return a line for each path of a run's tasks. No file is read, and no task source makes rows.

    Raises:
        ConfigError, DataError, PluginError: as `load_sources`, as far as this is known without the rows.
    """
    path, reader = _only_path(config), _Reader(config)
    return [
        reader.describe(each) for each in ([source.path for source in config.data.sources] if path is None else [path])
    ]


def _only_path(config: RunConfig) -> str | None:
    """Return the path of the tasks; None if they have several."""
    data = config.data
    if not config.rollout.validation:
        if data.path is None and not data.sources:
            raise ConfigError("data.path: missing; name a file here or several in data.sources")
        return data.path
    if data.validation_path is None:
        raise ConfigError("rollout.validation is true, but data.validation_path is not set")
    return data.validation_path


@frozen(slots=False)
class _Reader:
    """Reads the paths of a config."""

    config: RunConfig

    def read(
        self, path: str, columns: Mapping[DataColumn, str | None], limit: int | None, offset: int = 0
    ) -> list[Task]:
        """Return the tasks of a file or of a task source."""
        config = self.config
        seed = config.rollout.seed if config.data.shuffle else None
        if config.is_task_source(path):
            rows = read_source_rows(self._host, path, config.base_dir)
            tasks = take_tasks(path, rows, offset=offset, limit=limit, shuffle_seed=seed, columns=columns)
        else:
            form = None if config.data.format == "auto" else config.data.format
            file = config.locate(path)
            tasks = read_tasks(file, format=form, offset=offset, limit=limit, shuffle_seed=seed, columns=columns)
        if _VERL_SINGLE_TURN in {config.agent.name, *config.agents}:
            return tasks
        return [
            evolve(each, agent_name="single_turn") if each.agent_name == _VERL_SINGLE_TURN else each for each in tasks
        ]

    def describe(self, path: str) -> str:
        """Return one line about the rows of a path."""
        config = self.config
        if config.is_task_source(path):
            return describe_rows(self._host, path, config.base_dir)
        return f"file {config.locate(path)}"

    @cached_property
    def _host(self) -> Host:
        return load_plugins(self.config)
