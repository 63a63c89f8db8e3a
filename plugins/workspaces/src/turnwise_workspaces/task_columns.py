"""The columns of a task that describe its workspace."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Final, Literal

from attrs import field, frozen

from turnwise import Task
from turnwise.config.structuring import structure
from turnwise.errors import ConfigError, InfrastructureError

WORKSPACE_COLUMN: Final = "workspace"


@frozen(kw_only=True)
class TaskWorkspace:
    """
    Column `workspace` of a task: what its workspace has in place of the options of the tools.

    Attributes:
        image: of the root file system; empty for the options' own.
        folder: working folder; empty for the options' own.
        folders: more folders outside of the working folder that the processes can write.
        environment: more variables of the commands.
        network: `none` for a task whose commands must reach nothing, whatever the options say. No task gives itself
            more than the options do.
    """

    image: str = ""
    folder: str = ""
    folders: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(factory=dict)
    network: Literal["", "none"] = ""


def read_workspace(task: Task) -> TaskWorkspace:
    """Return the column `workspace` of a task; `InfrastructureError` if it holds something else."""
    given = task.extra.get(WORKSPACE_COLUMN)
    if given is None:
        return TaskWorkspace()
    try:
        return structure(given, TaskWorkspace)
    except ConfigError as error:
        raise InfrastructureError(f"{_place(task, WORKSPACE_COLUMN)}: {error}") from error


def read_files(task: Task, column: str) -> dict[str, bytes]:
    """Return the contents by path in a column; `InfrastructureError` if it holds something else."""
    files = task.extra.get(column)
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise InfrastructureError(f"{_place(task, column)}: expected a mapping of texts by path, got {files!r}")
    try:
        return {str(path): decode_content(content) for path, content in files.items()}
    except ValueError as error:
        raise InfrastructureError(f"{_place(task, column)}: expected a mapping of texts by path, got {error}") from None


def encode_content(data: bytes) -> object:
    """Return bytes as a JSON value: a text, or ``{"base64": TEXT}`` for bytes that are none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def decode_content(content: object) -> bytes:
    """Return the bytes that `encode_content` has encoded; `ValueError` for another value."""
    if isinstance(content, str):
        return content.encode(errors="surrogateescape")
    if isinstance(content, Mapping) and content.keys() == {"base64"} and isinstance(content["base64"], str):
        try:
            return base64.b64decode(content["base64"], validate=True)
        except binascii.Error:
            pass
    raise ValueError(f"{content!r:.100}")


def _place(task: Task, column: str) -> str:
    return f"task {task.uid!r} (row {task.sample_index}): column {column!r}"
