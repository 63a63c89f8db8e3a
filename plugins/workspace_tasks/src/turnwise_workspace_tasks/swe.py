"""
Reads rows in SWE-bench's form: a repository, a commit, an issue, and the tests that a patch must make pass.

The repositories lie on this machine. The files of the commit are the agent's. The test files that the row names or its
`test_patch` changes come into the working folder when the agent has ended, over whatever it made of them.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import evolve, field, frozen, validators

from turnwise.errors import DataError
from turnwise.files import expanded
from turnwise_task_files import parse_text
from turnwise_task_files.row_files import read_rows
from turnwise_workspace_tasks.folders import MAX_TASK_BYTES, read_tree
from turnwise_workspace_tasks.graded_task import GradedTask, Solution, Tests
from turnwise_workspaces.task_columns import TaskWorkspace

NAME: Final = "swe"
_GIT_S: Final = 120.0


@frozen(kw_only=True)
class SweOptions:
    """
    Options of a path, such as `swe:rows.jsonl?repositories=repositories`.

    Attributes:
        repositories: folder with a git repository, or a folder of files, for each `OWNER__NAME` of the rows; relative
            to the config.
        command: that runs the tests in the working folder, and prints pytest's summary (`-rA`).
        image: of the workspaces; `{name}` is the `instance_id`. Its working folder has the files itself.
        folder: working folder of the workspaces; empty for the one of the tools.
        timeout_s: seconds that the tests may take.
    """

    repositories: str = "."
    command: str = "python3 -m pytest -rA"
    image: str = ""
    folder: str = ""
    timeout_s: float = field(default=600.0, validator=validators.gt(0.0))


@frozen
class SweSource:
    """
    Reads ``FILE?NAME=VALUE&...``: a JSONL, JSON, Parquet or CSV file with rows.

    Attributes:
        base: folder from which relative paths start.
    """

    base: Path = Path()

    def starting_from(self, folder: Path) -> SweSource:
        """Return the source that reads relative paths from a folder."""
        return evolve(self, base=folder)

    def describe(self, text: str) -> str:
        """Return one line about the rows of a text; `DataError` when there is no such file."""
        path, options = parse_text(text, SweOptions)
        if not (file := self.base / expanded(path)).is_file():
            raise DataError(f"{file}: there is no such file")
        return f"rows of {file} with the repositories of {self.base / options.repositories}"

    def rows(self, text: str) -> Iterator[Mapping[str, object]]:
        """Yield the rows of a text; `DataError` as `describe`, and when a row or its repository cannot be read."""
        return (task.row() for task in self.tasks(text))

    def tasks(self, text: str) -> Iterator[GradedTask]:
        """Yield the tasks of a text, as `rows`."""
        self.describe(text)
        path, options = parse_text(text, SweOptions)
        repositories = self.base / expanded(options.repositories)
        for where, row in read_rows(self.base / expanded(path), None):
            try:
                yield read_swe_row(row, repositories, options)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error


def read_swe_row(row: object, repositories: Path, options: SweOptions) -> GradedTask:
    """Return the task of a row; `DataError` when the row or its repository cannot be read."""
    if not isinstance(row, Mapping):
        raise DataError(f"expected an object, got {row!r:.60}")
    name, issue, repository, commit = (_text(row, each) for each in _NEEDED)
    files = _read_files(repositories / repository.replace("/", "__"), commit)
    tests, removed = _apply(files, str(row.get("test_patch") or ""), "test_patch")
    fixed, gone = _apply(files, str(row.get("patch") or ""), "patch")
    must_pass = (*_names(row, "FAIL_TO_PASS"), *_names(row, "PASS_TO_PASS"))
    if not must_pass:
        raise DataError("FAIL_TO_PASS and PASS_TO_PASS name no test")
    tests = _restored(files, must_pass, {*fixed, *gone, *removed}) | tests
    image = options.image.replace("{name}", name)
    return GradedTask(
        name=name,
        source=NAME,
        instruction=issue,
        files={} if image else files,
        workspace=TaskWorkspace(image=image, folder=options.folder, folders=("/logs",)),
        tests=Tests(
            files=tests,
            command=_shell(removed, options.command),
            fresh=("/logs",),
            timeout_s=options.timeout_s,
            result="pytest",
            must_pass=must_pass,
        ),
        solution=Solution(command=_shell(gone, "true"), files=fixed) if row.get("patch") else None,
    )


def _restored(files: Mapping[str, bytes], must_pass: Sequence[str], changed: Container[str]) -> dict[str, bytes]:
    """Return the files of the commit that an agent has no reason to change: with the named tests, and `conftest.py`."""
    named = {name.partition("::")[0] for name in must_pass}
    wanted = [path for path in files if path in named or path.rpartition("/")[2] == "conftest.py"]
    return {path: files[path] for path in wanted if path not in changed}


_NEEDED: Final = ("instance_id", "problem_statement", "repo", "base_commit")


def _text(row: Mapping[str, object], name: str) -> str:
    found = row.get(name)
    if not isinstance(found, str) or not found.strip():
        raise DataError(f"{name}: expected a text, got {found!r:.60}")
    return found


def _names(row: Mapping[str, object], name: str) -> list[str]:
    """Return a list of names, which SWE-bench writes as JSON text."""
    found = row.get(name)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise DataError(f"{name}: expected a list of names: {error}") from error
    if not isinstance(found, list | tuple | type(None)):
        raise DataError(f"{name}: expected a list of names, got {found!r:.60}")
    return [str(each) for each in found or ()]


def _read_files(repository: Path, commit: str) -> dict[str, bytes]:
    """Return the files of a commit; those of a folder that is no git repository are taken as they are."""
    if not repository.is_dir():
        raise DataError(f"{repository}: there is no such folder")
    if not (repository / ".git").exists() and not (repository / "HEAD").exists():
        return read_tree(repository)
    if commit.startswith("-"):
        raise DataError(f"base_commit: {commit!r:.60} is no commit")
    archive = _git(["-C", str(repository), "archive", "--format=tar", commit], b"", repository)
    if len(archive) > 2 * MAX_TASK_BYTES:
        raise DataError(f"{repository}: has more than {MAX_TASK_BYTES // 2**20} MiB; put large files into an image")
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and (file := tar.extractfile(member)) is not None:
                found[member.name] = file.read()
            elif not member.isdir():
                raise DataError(f"{repository}: {member.name} is a link; put links into an image")
    return found


def _apply(files: Mapping[str, bytes], patch: str, name: str) -> tuple[dict[str, bytes], list[str]]:
    """Return the files that a patch changes, with their new contents, and the paths that it removes."""
    if not patch.strip():
        return {}, []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        for path, data in files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        try:
            _git(["apply", "-"], patch.encode(), folder)
        except DataError as error:
            raise DataError(f"{name}: cannot be applied: {error}") from error
        after = read_tree(folder)
    return {path: data for path, data in after.items() if files.get(path) != data}, sorted(set(files) - set(after))


def _git(words: list[str], data: bytes, folder: Path) -> bytes:
    environment = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    try:
        done = subprocess.run(
            ["git", *words],
            input=data,
            cwd=folder,
            env={**environment, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"},
            capture_output=True,
            check=False,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"git cannot run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise DataError(f"{folder}: {lines[0] if lines else f'git ended with exit code {done.returncode}'}")
    return done.stdout


def _shell(removed: list[str], command: str) -> tuple[str, ...]:
    removals = f"rm -f -- {shlex.join(removed)}; " if removed else ""
    return ("/bin/sh", "-c", removals + command)
