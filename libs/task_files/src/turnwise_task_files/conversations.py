"""Conversations for fine-tuning from files: the whole of a conversation, and the tools that it was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import frozen

from turnwise.errors import DataError
from turnwise.types import JsonDict, Message, ToolSchema
from turnwise_strict_json import MalformedError, load_json
from turnwise_task_files.messages import kind_of, take_messages
from turnwise_task_files.row_files import read_rows
from turnwise_task_files.values import plain, without_nulls

_COMPLETION: Final = "completion"


@frozen
class Conversation:
    """
    A row of a file.

    Attributes:
        where: its place in the file, for errors.
        messages: in the OpenAI form.
        tools: schemas in the OpenAI form; empty for a conversation without tools, and None if the row does not say.
    """

    where: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSchema, ...] | None


def read_conversations(file: Path) -> Iterator[Conversation]:
    """
    Yield the conversations of a JSONL file, a JSON list or a Parquet file.

    A row has `messages`, ShareGPT's `conversations`, or TRL's `prompt` and `completion`, and perhaps `tools`: a list of
    schemas, or the same as JSON text, which Parquet files of others have. Files of pictures are below the folder of the
    file.

    Raises:
        DataError: the file cannot be read or holds no row, or a row is no conversation; the text has its place.
    """
    found = False
    # In Parquet, an object has the keys of the objects of all rows, with null where its own row lacks a key.
    is_columnar = file.suffix.lower() == ".parquet"
    for where, row in read_rows(file, None):
        found = True
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: expected an object, got {kind_of(row)}")
        values: JsonDict = {str(name): plain(value, f"{where}: {name}") for name, value in row.items()}
        if is_columnar:
            values = {name: without_nulls(value) for name, value in values.items()}
        messages = _take_messages(values, where, file.parent)
        yield Conversation(where=where, messages=messages, tools=_take_tools(values, where))
    if not found:
        raise DataError(f"{file}: holds no rows")


def _take_messages(values: JsonDict, where: str, folder: Path) -> tuple[Message, ...]:
    completion = values.pop(_COMPLETION, None)
    if completion is None or values.get("messages") is not None:
        return take_messages(values, where, folder)
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    before = take_messages(values, where, folder)
    return (*before, *take_messages({"messages": completion}, f"{where}: {_COMPLETION}", folder))


def _take_tools(values: JsonDict, where: str) -> tuple[ToolSchema, ...] | None:
    if values.get("functions"):
        raise DataError(f"{where}: functions is an older form; use tools")
    tools: object = values.get("tools")
    if isinstance(tools, str):
        try:
            tools = load_json(tools) if tools.strip() else None
        except MalformedError as error:
            raise DataError(f"{where}: tools: not JSON: {error}") from None
    return check_tools(tools, f"{where}: tools") if tools is not None else None


def check_tools(tools: object, where: str) -> tuple[ToolSchema, ...]:
    """Return the schemas of a list in the OpenAI form; `DataError` starts with `where`."""
    if not isinstance(tools, list):
        raise DataError(f"{where}: expected a list of schemas, got {kind_of(tools)}")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            raise DataError(f"{where}[{index}]: expected {form}")
    return tuple(tools)
