"""The task sources whose tasks are folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import evolve, field, frozen, validators

from turnwise.errors import ConfigError, DataError
from turnwise.files import expanded
from turnwise.plugin.registry import did_you_mean
from turnwise_task_files import parse_text
from turnwise_workspace_tasks import harbor, swe, terminal_bench
from turnwise_workspace_tasks.dockerfile import DOCKERFILE
from turnwise_workspace_tasks.graded_task import RESULT_FORMS, GradedTask, ResultForm
from turnwise_workspace_tasks.swe import SweSource

Reader = Callable[[Path, str], GradedTask]
FORMS: Final[Mapping[str, tuple[str, Reader]]] = {
    "harbor": (harbor.CONFIG, harbor.read_harbor_task),
    "terminal_bench": (terminal_bench.CONFIG, terminal_bench.read_terminal_bench_task),
}
"""By the name of the source: the file that each task has, and the function that reads a task."""
BUILT: Final = {"harbor": "environment", "terminal_bench": ""}
"""By the name of the source: the folder of a task from which an image is built."""


@frozen(kw_only=True)
class Options:
    """
    Options of a path, such as `harbor:tasks?image=local/{name}`.

    Attributes:
        image: of the workspaces, in place of the ones that the tasks name or describe; `{name}` is the task's name.
        tasks: names of the tasks that are read, joined by commas; null reads all.
        result: form of the results, `reward`, `ctrf`, `junit`, `pytest` or `exit_code`; null finds it in the test
            files.
    """

    image: str = ""
    tasks: str | None = None
    result: ResultForm | None = field(default=None, validator=validators.optional(validators.in_(RESULT_FORMS)))


@frozen
class FolderSource:
    """
    Reads ``FOLDER?NAME=VALUE&...``: a folder of tasks, or the folder of one task.

    Attributes:
        form: name of the form, one of `FORMS`.
        base: folder from which relative paths start.
    """

    form: str
    base: Path = Path()

    def starting_from(self, folder: Path) -> FolderSource:
        """Return the source that reads relative paths from a folder."""
        return evolve(self, base=folder)

    def describe(self, text: str) -> str:
        """Return one line about the rows of a text; `DataError` when its folder has no tasks."""
        folders, _ = self._find(text)
        return f"{len(folders)} tasks of {folders[0].parent} in the form {self.form}"

    def rows(self, text: str) -> Iterator[Mapping[str, object]]:
        """Yield the rows of a text; `DataError` as `describe`, and when a task cannot be read."""
        return (task.row() for task in self.tasks(text))

    def tasks(self, text: str) -> Iterator[GradedTask]:
        """Yield the tasks of a text, as `rows`."""
        folders, options = self._find(text)
        for folder in folders:
            task = FORMS[self.form][1](folder, options.image.replace("{name}", folder.name))
            if options.result is not None:
                task = evolve(task, tests=harbor.with_result(task.tests, options.result))
            yield task

    def images(self, text: str) -> Iterator[tuple[str, str, Path]]:
        """
        Yield task, image and folder of each Dockerfile of a text.

        Raises:
            DataError: as `describe`, or the text does not name an image for each task.
        """
        folders, options = self._find(text)
        if "{name}" not in options.image:
            raise DataError("images that are built need names: add an option such as ?image=local/{name}")
        for folder in folders:
            place = folder / BUILT[self.form]
            if (place / DOCKERFILE).is_file():
                yield folder.name, options.image.replace("{name}", folder.name), place

    def _find(self, text: str) -> tuple[list[Path], Options]:
        path, options = parse_text(text, Options)
        found = find_tasks(self.base / expanded(path), self.form)
        if options.tasks is None:
            return found, options
        by_name = {each.name: each for each in found}
        wanted = [name.strip() for name in options.tasks.split(",")]
        for name in wanted:
            if name not in by_name:
                raise DataError(f"option 'tasks': there is no task {name!r}{did_you_mean(name, tuple(by_name))}")
        return [by_name[name] for name in dict.fromkeys(wanted)], options


def make_source(form: str) -> FolderSource | SweSource:
    """Return the source of a form; `ConfigError` for an unknown one."""
    if form == swe.NAME:
        return SweSource()
    if form not in FORMS:
        raise ConfigError(f"there is no form {form!r}; known: {', '.join([*FORMS, swe.NAME])}")
    return FolderSource(form)


def find_tasks(folder: Path, form: str) -> list[Path]:
    """Return the folders of the tasks in a folder, by name; `DataError` when there are none."""
    marker = FORMS[form][0]
    try:
        if (folder / marker).is_file():
            return [folder]
        found = [each for each in sorted(folder.iterdir()) if (each / marker).is_file()]
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error
    if not found:
        raise DataError(f"{folder}: no folder in it has a file {marker}")
    return found
