"""A task with hidden tests, and its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import attr
from attrs import evolve, field, frozen, validators

from turnwise.config.structuring import structure
from turnwise.errors import ConfigError, DataError
from turnwise.types import JsonDict
from turnwise_workspaces.task_columns import TaskWorkspace, decode_content, encode_content

TESTS_COLUMN: Final = "tests"
ResultForm = Literal["reward", "ctrf", "junit", "pytest", "exit_code"]
RESULT_FORMS: Final[tuple[ResultForm, ...]] = ("reward", "ctrf", "junit", "pytest", "exit_code")


@frozen(kw_only=True)
class Tests:
    """
    The hidden tests of a task.

    Attributes:
        files: contents by absolute path.
        command: that runs them, in the working folder.
        fresh: folders that are emptied before the tests: the ones of the files and of the results.
        timeout_s: seconds that the command may take.
        environment: variables of the command.
        result: form of the result; `reward` is a file with a number, or with numbers by name, and `pytest` the lines
            of a summary (`pytest -rA`) in the output.
        results: absolute paths of the result; the first that exists counts.
        must_pass: names of the tests that decide the score; empty for all.
    """

    command: tuple[str, ...] = field(validator=validators.min_len(1))
    files: Mapping[str, Any] = field(factory=dict)
    fresh: tuple[str, ...] = ()
    timeout_s: float = field(default=600.0, validator=validators.gt(0.0))
    environment: Mapping[str, str] = field(factory=dict)
    result: ResultForm = field(default="exit_code", validator=validators.in_(RESULT_FORMS))
    results: tuple[str, ...] = ()
    must_pass: tuple[str, ...] = ()


@frozen(kw_only=True)
class Solution:
    """
    The reference solution of a task.

    Attributes:
        files: contents by absolute path.
        command: that solves the task, in the working folder.
        environment: variables of the command.
    """

    command: tuple[str, ...]
    files: Mapping[str, bytes]
    environment: Mapping[str, str] = field(factory=dict)


@frozen(kw_only=True)
class GradedTask:
    """
    A task that an agent does in a workspace.

    Attributes:
        name: of the task, unique in its folder.
        source: name of the form that it was read from.
        instruction: for the agent.
        files: contents of the agent's files by path, relative to the working folder or absolute.
        workspace: image and folders.
        tests: hidden from the agent.
        solution: hidden, and not in the row; None if the task has none.
        time_s: seconds that the task gives the agent; None if it does not say.
    """

    name: str
    source: str
    instruction: str
    files: Mapping[str, bytes]
    workspace: TaskWorkspace
    tests: Tests
    solution: Solution | None = None
    time_s: float | None = None

    def row(self) -> JsonDict:
        """Return the row of the task, as a task source has it."""
        workspace = {name: value for name, value in _plain(self.workspace).items() if value}
        return {
            "uid": self.name,
            "prompt": self.instruction,
            "data_source": self.source,
            "files": _encode(self.files),
            "workspace": workspace,
            TESTS_COLUMN: {**_plain(self.tests), "files": _encode(self.tests.files)},
        }


def read_tests(extra: Mapping[str, object], place: str) -> Tests:
    """Return the tests among the columns of a task; `DataError` when they lack or have another form."""
    given = extra.get(TESTS_COLUMN)
    if given is None:
        raise DataError(f"{place}: has no column {TESTS_COLUMN!r}, which the reward 'workspace_tests' runs")
    try:
        tests = structure(given, Tests)
        return evolve(tests, files={path: decode_content(each) for path, each in tests.files.items()})
    except (ConfigError, ValueError) as error:
        raise DataError(f"{place}: column {TESTS_COLUMN!r}: {error}") from error


def script_command(path: str, data: bytes) -> tuple[str, ...]:
    """Return the command that runs a script, by the program in its first line, or by a POSIX shell."""
    first = data.split(b"\n", 1)[0].decode(errors="replace").strip()
    program: Sequence[str] = first[2:].split(None, 1) if first.startswith("#!") else ("/bin/sh",)
    return (*program, path)


def _plain(values: Any) -> JsonDict:
    plain: JsonDict = attr.asdict(values, retain_collection_types=False)
    return plain


def _encode(files: Mapping[str, bytes]) -> JsonDict:
    return {path: encode_content(data) for path, data in files.items()}
