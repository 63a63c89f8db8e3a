"""
Reads tasks in Harbor's form: a folder with `task.toml`, `instruction.md`, `environment/`, `tests/` and `solution/`.

The tests come to `/tests` and the solution to `/solution`, and `tests/test.sh` writes its result below
`/logs/verifier`, as in Harbor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from attrs import evolve

from turnwise.errors import DataError
from turnwise_workspace_tasks.dockerfile import DOCKERFILE, Recipe, read_dockerfile, read_working_folder
from turnwise_workspace_tasks.folders import read_text, read_toml, read_tree, seconds, section, texts
from turnwise_workspace_tasks.graded_task import GradedTask, ResultForm, Solution, Tests, script_command
from turnwise_workspaces.task_columns import TaskWorkspace

CONFIG: Final = "task.toml"
RESULTS: Final = "/logs/verifier"
_FOLDERS: Final = ("/logs", "/solution", "/tests")
_TIMEOUT_S: Final = 600.0
_FILES: Final[Mapping[ResultForm, tuple[str, ...]]] = {
    "reward": (f"{RESULTS}/reward.txt", f"{RESULTS}/reward.json"),
    "ctrf": (f"{RESULTS}/ctrf.json",),
    "junit": (f"{RESULTS}/junit.xml",),
    "pytest": (),
    "exit_code": (),
}


def read_harbor_task(folder: Path, image: str = "") -> GradedTask:
    """
    Read a task.

    Args:
        folder: of the task.
        image: of the workspace, in place of the one that the task names or describes by a Dockerfile.

    Raises:
        DataError: the folder is no such task, or needs what a workspace does not have; one line.
    """
    path = folder / CONFIG
    config = read_toml(path)
    for name, inner in (("steps", ""), ("environment", "mcp_servers"), ("verifier", "environment")):
        if name in config if not inner else section(config, name, path).get(inner):
            raise DataError(f"{path}: {inner or name}: is not supported")
    environment = section(config, "environment", path)
    if environment.get("gpus"):
        raise DataError(f"{path}: environment.gpus: a workspace has no GPU")
    recipe = _read_environment(folder, image or _text(environment, "docker_image", path))
    workspace = TaskWorkspace(
        image=image or _text(environment, "docker_image", path),
        folder=_text(environment, "workdir", path) or recipe.folder,
        folders=_FOLDERS,
        environment=recipe.environment | texts(environment, "env", f"{path}: environment"),
        network="" if environment.get("allow_internet", True) else "none",
    )
    verifier = section(config, "verifier", path)
    return GradedTask(
        name=folder.name,
        source="harbor",
        instruction=read_text(folder / "instruction.md"),
        files=recipe.files,
        workspace=workspace,
        tests=_read_tests(folder, verifier, path),
        solution=_read_solution(folder, texts(section(config, "solution", path), "env", f"{path}: solution")),
        time_s=seconds(section(config, "agent", path), "timeout_sec", _TIMEOUT_S, f"{path}: agent"),
    )


def _read_environment(folder: Path, image: str) -> Recipe:
    """Return the agent's files: what the Dockerfile copies, or all if there is none; an image has them itself."""
    context = read_tree(folder / "environment")
    return recipe_in_image(context) if image else read_context(folder / "environment", context)


def recipe_in_image(context: Mapping[str, bytes]) -> Recipe:
    """Return the part of a Dockerfile's effect that its image does not have: the working folder of commands."""
    text = context.get(DOCKERFILE, b"").decode(errors="replace")
    return Recipe(folder=read_working_folder(text))


def read_context(folder: Path, context: dict[str, bytes]) -> Recipe:
    """Return the effect of a Dockerfile in the folder of its context; `DataError` when it needs an image."""
    dockerfile = context.pop(DOCKERFILE, None)
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if name in context:
            raise DataError(f"{folder}/{name}: is not supported; build an image and name it as image=NAME")
    if dockerfile is None:
        return Recipe(files=context)
    try:
        recipe = read_dockerfile(dockerfile.decode(errors="replace"), context)
    except DataError as error:
        raise DataError(f"{folder}/Dockerfile: {error}") from error
    if recipe.run:
        raise DataError(f"{folder}/Dockerfile: {recipe.run!r:.80} needs an image: build it and name it as image=NAME")
    return recipe


def _read_tests(folder: Path, verifier: Mapping[str, object], path: Path) -> Tests:
    files = {f"/tests/{name}": data for name, data in read_tree(folder / "tests").items()}
    if (script := files.get("/tests/test.sh")) is None:
        raise DataError(f"{folder}/tests/test.sh: there is no such file")
    tests = Tests(
        files=files,
        command=script_command("/tests/test.sh", script),
        fresh=("/tests", "/logs"),
        timeout_s=seconds(verifier, "timeout_sec", _TIMEOUT_S, f"{path}: verifier"),
        environment=texts(verifier, "env", f"{path}: verifier"),
    )
    return with_result(tests, find_form(files))


def with_result(tests: Tests, form: ResultForm) -> Tests:
    """Return tests whose result has another form."""
    return evolve(tests, result=form, results=_FILES[form])


def find_form(files: Mapping[str, bytes]) -> ResultForm:
    """Return the form of the results that test files write: the first one whose file they name."""
    # By the text and not by the files that are there afterwards: else a test that the agent's code ends early with exit
    # code 0 would pass.
    for form, names in _FILES.items():
        if any(name.rpartition("/")[2].encode() in data for name in names for data in files.values()):
            return form
    return "exit_code"


def _read_solution(folder: Path, environment: Mapping[str, str]) -> Solution | None:
    files = {f"/solution/{name}": data for name, data in read_tree(folder / "solution").items()}
    if (script := files.get("/solution/solve.sh")) is None:
        return None
    return Solution(command=script_command("/solution/solve.sh", script), files=files, environment=environment)


def _text(values: Mapping[str, object], name: str, path: Path) -> str:
    found = values.get(name) or ""
    if not isinstance(found, str):
        raise DataError(f"{path}: environment.{name}: expected a text, got {found!r:.60}")
    return found
