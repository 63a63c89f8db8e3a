"""Reads the rows of task sources, and the texts that sources get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

from turnwise import Resources
from turnwise.config.file import apply_overrides
from turnwise.config.resolve import build_part
from turnwise.config.structuring import structure
from turnwise.errors import DataError, PluginError, TurnwiseError, describe
from turnwise.plugin.host import Host
from turnwise.types import JsonDict
from turnwise_task_files.row_files import Located
from turnwise_task_files.task_source import FileSource, TaskSource

_KIND: Final = "task_sources"
OptionsT = TypeVar("OptionsT")


def parse_text(text: str, options: type[OptionsT]) -> tuple[str, OptionsT]:
    """
    Return the two sides of `REST?NAME=VALUE&NAME=VALUE`, the form that most sources give their texts.

    Args:
        text: with options or without.
        options: attrs class of the options.

    Raises:
        ConfigError: an option is unknown, or its value does not fit.
        DataError: something after the question mark has another form, or an option is there twice.
    """
    rest, values = split_options(text)
    return rest, structure(values, options)


def split_options(text: str) -> tuple[str, JsonDict]:
    """Return the two sides of `REST?NAME=VALUE&NAME=VALUE`; values are read as in overrides of the command line."""
    rest, _, query = text.partition("?")
    given = query.split("&") if query else []
    names = [each.partition("=")[0].strip() for each in given]
    for name, each in zip(names, given, strict=True):
        if "=" not in each or not name.isidentifier():
            raise DataError(f"option {each!r}: expected NAME=VALUE")
        if names.count(name) > 1:
            raise DataError(f"option {name!r} is there twice")
    return rest, apply_overrides({}, given)


def read_source_rows(host: Host, path: str, folder: Path) -> Iterator[Located]:
    """Yield the rows of `SOURCE:TEXT` with their places; errors start with the path, relative files with the folder."""
    source, text = _find(host, path, folder)
    try:
        for number, row in enumerate(source.rows(text)):
            yield f"{path}, row {number}", row
    except Exception as error:
        raise _explain(error, path) from error


def describe_rows(host: Host, path: str, folder: Path) -> str:
    """Return one line about the rows of `SOURCE:TEXT`; as `read_source_rows`."""
    source, text = _find(host, path, folder)
    try:
        return source.describe(text)
    except Exception as error:
        raise _explain(error, path) from error


def _find(host: Host, path: str, folder: Path) -> tuple[TaskSource, str]:
    name, _, text = path.partition(":")
    if _KIND not in host.kinds:
        raise PluginError(f"{path}: no such file, and a task source needs the plugin 'task_files' among the plugins")
    try:
        part: TaskSource = build_part(host, _KIND, name, Resources())
    except TurnwiseError as error:
        unknown = "" if name in host.registry(_KIND) else "no such file, and "
        raise PluginError(f"{path}: {unknown}{error}") from error
    return (part.starting_from(folder) if isinstance(part, FileSource) else part), text


def _explain(error: Exception, path: str) -> TurnwiseError:
    """Return the error of a source with the path in each line; one that is no `TurnwiseError` is a mistake in it."""
    if isinstance(error, TurnwiseError):
        kind = PluginError if isinstance(error, PluginError) else DataError
        return kind("\n".join(f"{path}: {line}" for line in str(error).splitlines()))
    return PluginError(f"{path}: the task source raised {describe(error)}")
