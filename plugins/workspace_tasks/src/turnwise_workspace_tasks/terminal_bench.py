"""
Reads tasks in Terminal-Bench's form: `task.yaml`, `run-tests.sh`, `tests/`, `solution.sh` and a Dockerfile beside them.

The tests come to `/tests`, and pass when each line of pytest's summary in their output says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from turnwise.config.file import read_mapping
from turnwise.errors import ConfigError, DataError
from turnwise_workspace_tasks.folders import read_tree, seconds
from turnwise_workspace_tasks.graded_task import GradedTask, Solution, Tests, script_command
from turnwise_workspace_tasks.harbor import read_context, recipe_in_image
from turnwise_workspaces.task_columns import TaskWorkspace

CONFIG: Final = "task.yaml"
_HIDDEN: Final = ("tests/", "solution", "run-tests.sh", CONFIG, "docker-compose.y")
_AGENT_S: Final = 360.0
_TEST_S: Final = 60.0


def read_terminal_bench_task(folder: Path, image: str = "") -> GradedTask:
    """Read a task; arguments and errors are as those of `read_harbor_task`."""
    path = folder / CONFIG
    try:
        config = read_mapping(path)
    except ConfigError as error:
        raise DataError(" ".join(str(error).split())) from error
    instruction = config.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise DataError(f"{path}: instruction: expected a text, got {instruction!r:.60}")
    if config.get("parser_name", "pytest") != "pytest":
        raise DataError(f"{path}: parser_name: only pytest is supported, not {config['parser_name']!r:.60}")
    files = read_tree(folder)
    context = {name: data for name, data in files.items() if not name.startswith(_HIDDEN)}
    recipe = recipe_in_image(context) if image else read_context(folder, context)
    return GradedTask(
        name=folder.name,
        source="terminal_bench",
        instruction=instruction.strip(),
        files=recipe.files,
        workspace=TaskWorkspace(
            image=image, folder=recipe.folder, folders=("/logs", "/solution", "/tests"), environment=recipe.environment
        ),
        tests=_read_tests(folder, files, config),
        solution=_read_solution(files),
        time_s=seconds(config, "max_agent_timeout_sec", _AGENT_S, str(path)),
    )


def _read_tests(folder: Path, files: dict[str, bytes], config: dict[str, Any]) -> Tests:
    if (script := files.get("run-tests.sh")) is None:
        raise DataError(f"{folder}/run-tests.sh: there is no such file")
    hidden = {f"/{name}": data for name, data in files.items() if name.startswith("tests/")}
    return Tests(
        files={**hidden, "/tests/run-tests.sh": script},
        command=script_command("/tests/run-tests.sh", script),
        fresh=("/tests", "/logs"),
        timeout_s=seconds(config, "max_test_timeout_sec", _TEST_S, f"{folder}/{CONFIG}"),
        environment={"TEST_DIR": "/tests"},
        result="pytest",
    )


def _read_solution(files: dict[str, bytes]) -> Solution | None:
    if (script := files.get("solution.sh")) is None:
        return None
    place = "/solution/solution.sh"
    return Solution(command=script_command(place, script), files={place: script})
