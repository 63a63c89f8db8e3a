"""
Checks task folders, for `turnwise check tasks FOLDER`.

The tests of a good task give 1 when its reference solution has run, and 0 when nothing has.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from attrs import frozen
from rich.table import Table

from turnwise import Resources, Task
from turnwise.config.parts import Choice
from turnwise.console import Console
from turnwise.errors import ConfigError, TurnwiseError
from turnwise.protocols.command import FAILED, OK
from turnwise.types import JsonObject
from turnwise_task_files.rows import task_from_row
from turnwise_workspace_tasks.config import RewardConfig
from turnwise_workspace_tasks.graded_task import GradedTask
from turnwise_workspace_tasks.grading import Grade, grade, solve
from turnwise_workspace_tasks.source import FolderSource, make_source
from turnwise_workspace_tasks.swe import SweSource
from turnwise_workspaces.config import WorkspaceConfig
from turnwise_workspaces.use import WorkspaceUse, make_use

_SOLVE_S: Final = 600.0
Source = FolderSource | SweSource


@frozen(kw_only=True)
class Checked:
    """
    A task that was checked.

    Attributes:
        name: of the task.
        oracle: value of the tests after the solution; None if there is none.
        idle: value of the tests when nothing was done; None if there is none.
        seconds: of both.
        problem: what is wrong, one line; empty for a good task.
    """

    name: str
    oracle: float | None = None
    idle: float | None = None
    seconds: float = 0.0
    problem: str = ""


def check_tasks(
    places: Sequence[str],
    *,
    form: str,
    backend: str,
    options: JsonObject,
    at_once: int,
    build: str = "",
) -> int:
    """
    Check tasks, print a line for each one that ends and a table at the end.

    Args:
        places: folders, each with or without options as `data.path` has them: ``FOLDER?NAME=VALUE``.
        form: of the folders.
        backend: starts the workspaces.
        options: of the backend.
        at_once: number of workspaces at once.
        build: command that builds an image, such as ``podman build``, which gets the image's name and the folder of
            each Dockerfile before the checks; empty builds none.

    Returns:
        The exit code: 1 when a task is broken.

    Raises:
        ConfigError, DataError, PluginError: a folder has no tasks, a task cannot be read, or the backend has no such
            options.
    """
    source = make_source(form)
    if at_once < 1:
        raise ConfigError(f"--at-once must be at least 1, not {at_once}")
    if not places:
        raise ConfigError("check tasks needs a folder with tasks, such as: turnwise check tasks examples/shell_tasks")
    tasks = [task for place in places for task in source.tasks(place)]
    # A backend that needs an image has one if each task has.
    image = tasks[0].workspace.image if tasks and all(task.workspace.image for task in tasks) else ""
    use = make_use(WorkspaceConfig(backend=Choice(backend, dict(options)), image=image), Resources())
    console = Console()
    failed = build_images(source, places, build, console) if build else {}
    checked = asyncio.run(_check_all(tasks, use, at_once, console, failed))
    _print_table(console, checked)
    return FAILED if any(each.problem for each in checked) else OK


def build_images(source: Source, places: Sequence[str], build: str, console: Console) -> dict[str, str]:
    """
    Build the images of tasks, and return by task why an image cannot be built.

    Raises:
        ConfigError: the form has no Dockerfiles, or there is no such program.
        DataError: as `FolderSource.images` says.
    """
    if not isinstance(source, FolderSource):
        raise ConfigError("--build needs a form with Dockerfiles: harbor or terminal_bench")
    failed = {}
    for name, image, folder in [each for place in places for each in source.images(place)]:
        try:
            command = [*shlex.split(build), "--tag", image, str(folder)]
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--build: {build!r}: {error}") from error
        if done.returncode == 0:
            console.print(f"built {image}", highlight=False, soft_wrap=True)
        else:
            lines = (done.stderr or done.stdout).strip().splitlines()
            failed[name] = f"its image cannot be built: {lines[-1] if lines else f'exit code {done.returncode}'}"
    return failed


async def _check_all(
    tasks: Sequence[GradedTask], use: WorkspaceUse, at_once: int, console: Console, failed: Mapping[str, str]
) -> list[Checked]:
    free, done = asyncio.Semaphore(at_once), dict[int, Checked]()

    async def check(number: int, task: GradedTask) -> None:
        async with free:
            problem = failed.get(task.name)
            found = done[number] = Checked(name=task.name, problem=problem) if problem else await _check(task, use)
        said = found.problem or f"good, {found.seconds:.1f} s"
        console.print(f"[{len(done)} of {len(tasks)}] {task.name}: {said}", highlight=False, soft_wrap=True)

    async with asyncio.TaskGroup() as group:
        for number, task in enumerate(tasks):
            group.create_task(check(number, task))
    return [done[number] for number in range(len(tasks))]


async def _check(task: GradedTask, use: WorkspaceUse) -> Checked:
    """Grade a task twice; a failure of its workspace is its problem."""
    started = asyncio.get_running_loop().time()
    grades: dict[bool, Grade] = {}
    problems: list[str] = []
    try:
        row = task_from_row(task.row(), where=f"task {task.name!r}")
        for solved in (True, False):
            if not solved or task.solution is not None:
                grades[solved], said = await _grade(task, row, use, solved=solved)
                problems += said
    except TurnwiseError as error:
        problems.append(str(error))
    if task.solution is None:
        problems.insert(0, "it has no solution")
    values: Mapping[bool, float] = {solved: each.value for solved, each in grades.items()}
    return Checked(
        name=task.name,
        oracle=values.get(True),
        idle=values.get(False),
        seconds=asyncio.get_running_loop().time() - started,
        problem=" ".join("; ".join(problems).split()),
    )


async def _grade(task: GradedTask, row: Task, use: WorkspaceUse, *, solved: bool) -> tuple[Grade, list[str]]:
    problems: list[str] = []
    async with use.owner.workspace(use.spec(row)) as workspace:
        if solved and task.solution is not None:
            done = await solve(workspace, task.solution, task.time_s or _SOLVE_S)
            if done.exit_code != 0:
                text = done.stdout.decode(errors="replace").strip()
                problems.append(f"the solution ended with exit code {done.exit_code}: {text[-200:]}")
        found = await grade(workspace, task.tests, RewardConfig())
    wanted = 1.0 if solved else 0.0
    if found.value != wanted:
        why = found.problem or found.output.strip()[-300:]
        problems.append(f"{'the solution' if solved else 'doing nothing'} has reward {found.value:g}: {why}")
    elif found.problem:
        problems.append(found.problem)
    return found, problems


def _print_table(console: Console, checked: Sequence[Checked]) -> None:
    table = Table("task", "solution", "nothing done", "seconds", "")
    for each in checked:
        values = ["-" if value is None else f"{value:g}" for value in (each.oracle, each.idle)]
        table.add_row(each.name, *values, f"{each.seconds:.1f}", "broken" if each.problem else "good")
    console.print(table)
    good = sum(not each.problem for each in checked)
    console.print(f"{good} of {len(checked)} tasks are good", highlight=False)
