"""The tasks of a run: the files that the section `data` of its config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import evolve

from turnwise import RunConfig, Task
from turnwise.errors import ConfigError
from turnwise.options import DataColumn
from turnwise_task_files.rows import read_tasks

_VERL_SINGLE_TURN: Final = "single_turn_agent"
"""The name that verl's data sets have for `single_turn`; a config may give it to another agent."""


def load_tasks(config: RunConfig) -> list[Task]:
    """Read the tasks of a run; see `load_sources`."""
    return [task for tasks in load_sources(config) for task in tasks]


def load_sources(config: RunConfig) -> list[list[Task]]:
    """
    Read the tasks of a run: its data set, or the validation set where `rollout.validation` is true.

    Returns:
        The tasks of each of `data.sources`, or of the only file. Their uids differ: a later source's name is added to
        a uid that an earlier one has. Rows of verl's agent `single_turn_agent` name `single_turn`, unless the config
        has an agent of verl's name.

    Raises:
        ConfigError: `rollout.validation` is true, but the config names no validation set.
        DataError: a file cannot be read, or a row does not fit.
    """
    data = config.data
    path = data.path
    if config.rollout.validation:
        if data.validation_path is None:
            raise ConfigError("rollout.validation is true, but data.validation_path is not set")
        path = data.validation_path
    if path is not None:
        return [_read_tasks(config, path, data.columns, data.limit, data.offset)]
    found: list[list[Task]] = []
    seen: set[str] = set()
    for source in data.sources:
        label, columns = source.label, data.columns if source.columns is None else source.columns
        tasks = [
            evolve(
                task,
                uid=f"{task.uid}-{label}" if task.uid in seen else task.uid,
                data_source=task.data_source or label,
            )
            for task in _read_tasks(config, source.path, columns, source.limit)
        ]
        found.append(tasks)
        seen.update(task.uid for task in tasks)
    return found


def _read_tasks(
    config: RunConfig, path: str, columns: Mapping[DataColumn, str | None], limit: int | None, offset: int = 0
) -> list[Task]:
    tasks = read_tasks(
        config.locate(path),
        format=None if config.data.format == "auto" else config.data.format,
        limit=limit,
        offset=offset,
        shuffle_seed=config.rollout.seed if config.data.shuffle else None,
        columns=columns,
    )
    if _VERL_SINGLE_TURN in {config.agent.name, *config.agents}:
        return tasks
    return [evolve(each, agent_name="single_turn") if each.agent_name == _VERL_SINGLE_TURN else each for each in tasks]
