"""Reads verl's YAML files that name classes, and makes objects of the classes."""

from __future__ import annotations

import importlib
import inspect
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from attrs import frozen

from turnwise import Task
from turnwise.config.file import read_mapping
from turnwise.errors import ConfigError, describe


@frozen
class Section:
    """
    An entry of a file.

    Attributes:
        place: of the entry, for errors, such as `tools.yaml: tools.0`.
        class_name: place of the class, as `package.module.Name`.
        config: the first argument of the class.
        rest: all other keys.
    """

    place: str
    class_name: str
    config: Mapping[str, Any]
    rest: Mapping[str, Any]


def read_sections(path: Path, key: str) -> list[Section]:
    """Return the entries of the list `key` in a file; `ConfigError` names the file, the entry and the problem."""
    entries = read_mapping(path).get(key)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a list {key!r} of sections with 'class_name'")
    return [_read_section(entry, f"{path}: {key}.{index}") for index, entry in enumerate(entries)]


def _read_section(entry: object, place: str) -> Section:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise ConfigError(f"{place}: expected a section with 'class_name', such as 'package.module.Name'")
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{place}.config: expected a section, got {config!r}")
    rest = {name: value for name, value in entry.items() if name not in ("class_name", "config")}
    return Section(place, entry["class_name"], dict(config), rest)


def make(section: Section, modules: Sequence[str], **arguments: object) -> Any:
    """
    Make an object of a section's class.

    Args:
        section: names the class.
        modules: modules, with everything in them, that it may come from: a file may not run any code that it names.
        arguments: keyword arguments of the class.

    Raises:
        ConfigError: the class is not allowed, does not exist, or raises.
    """
    place, (module_name, _, name) = section.place, section.class_name.rpartition(".")
    if not any(module_name == each or module_name.startswith(f"{each}.") for each in modules):
        raise ConfigError(
            f"{place}: module {module_name!r} is not allowed; list it in 'modules', which has {', '.join(modules)}"
        )
    try:
        # verl prints the schema of each tool, which would mix with the output of a command.
        with redirect_stdout(io.StringIO()):
            found = getattr(importlib.import_module(module_name), name)
            return found(**arguments)
    except ImportError as error:
        hint = "; install it, or add its folder to PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{place}: {section.class_name} cannot be imported: {error}{hint}") from error
    except Exception as error:
        raise ConfigError(f"{place}: {section.class_name} cannot be made: {describe(error)}") from error


def task_options(task: Task, name: str) -> Mapping[str, Any]:
    """Return a column of a task that verl keeps in `extra_info`, such as `tools_kwargs`; empty when it has none."""
    extra_info = task.extra.get("extra_info")
    for columns in (task.extra, extra_info):
        if isinstance(columns, Mapping) and isinstance(columns.get(name), Mapping):
            found: Mapping[str, object] = columns[name]
            return found
    return {}


def accepted(function: Callable[..., object], options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options that a function takes: verl's versions and users differ in the names that they pass."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return dict(options)
    names = {each.name for each in parameters}
    return {name: value for name, value in options.items() if name in names}


def with_ground_truth(function: Callable[..., object], options: Mapping[str, object], task: Task) -> dict[str, Any]:
    """Add the task's ground truth for a function that has a parameter of this name, unless the options have it."""
    if "ground_truth" in inspect.signature(function).parameters and "ground_truth" not in options:
        return {**options, "ground_truth": task.ground_truth}
    return dict(options)
