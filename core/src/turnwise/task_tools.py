"""
Tools that a task brings: schemas in its column `tools`, which the prompt shows in place of the run's tools.

Data sets about calls have other tools in each row, and nothing that could run them. So these schemas are shown to the
model and read by the parser, and a tool of the run executes a call only if it has the same name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, Protocol, cast

from turnwise.errors import DataError
from turnwise.protocols import ToolParser
from turnwise.types import Task, TokenArray, ToolCall, ToolSchema

COLUMN: Final = "tools"
LATER_COLUMN: Final = "later_tools"
_FORM: Final = '{"type": "function", "function": {"name": ..., "parameters": ...}}'


def read_task_tools(task: Task) -> tuple[ToolSchema, ...] | None:
    """
    Return the schemas in the column `tools` of a task; None for a task without this column, which has the run's tools.

    The column is a list of schemas in the OpenAI form, or the same as JSON text, which Parquet files of others have.
    An empty list is a task without tools.

    Raises:
        DataError: the column has another form; one line that names the task.
    """
    return _read_column(task, COLUMN)


def read_later_tools(task: Task) -> tuple[ToolSchema, ...]:
    """
    Return the schemas in the column `later_tools` of a task: tools of the task that the prompt does not show.

    The model may call them, because a later message describes them. The column has the form of `tools`.

    Raises:
        DataError: as `read_task_tools`.
    """
    return _read_column(task, LATER_COLUMN) or ()


def _read_column(task: Task, column: str) -> tuple[ToolSchema, ...] | None:
    found: object = task.extra.get(column)
    if found is None:
        return None
    where = f"task {task.uid!r} (row {task.sample_index}): column {column!r}"
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError as error:
            raise DataError(f"{where} is a text, but not JSON: {error}") from None
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise DataError(f"{where} must be a list of schemas, not {type(found).__name__}")
    for index, schema in enumerate(found):
        if not _is_schema(schema):
            raise DataError(f"{where}: schema {index} must have the form {_FORM}")
    return tuple(found)


def _is_schema(schema: object) -> bool:
    function = schema.get("function") if isinstance(schema, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and bool(function["name"])


class _TypedParser(Protocol):
    """A tool parser that gives arguments the types in schemas; prompts may show tools that the run does not have."""

    def parse_for(self, token_ids: TokenArray, tools: Sequence[ToolSchema]) -> tuple[str, Sequence[ToolCall]]:
        """Return the text and the calls of a turn, as `ToolParser.parse`."""


def parse_turn(
    parser: ToolParser, token_ids: TokenArray, tools: Sequence[ToolSchema]
) -> tuple[str, Sequence[ToolCall]]:
    """Return the text and the calls of a turn, its arguments with the types of the prompt's tools if possible."""
    # A method of the class: a wrapper that forwards attributes changes what `parse` returns.
    if callable(getattr(type(parser), "parse_for", None)):
        return cast(_TypedParser, parser).parse_for(token_ids, tools)
    return parser.parse(token_ids)
