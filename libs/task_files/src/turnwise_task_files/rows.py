"""
Tasks from files: JSONL, a JSON list, Parquet or CSV, in turnwise's own row form or in verl's as it is.

A row needs `messages`, or `prompt` (a list of messages, or a text that becomes one user message), or ShareGPT's
`conversations`. These columns are understood. `Task.extra` keeps every other column, and `reward_model` and
`extra_info`:

- `uid`, a text or an integer; derived from the content when the row has none.
- `sample_index`, which each row of a file has or none, and no two share; or verl's ``extra_info.index``, which rows of
  joined data sets share; the row's number when neither is an integer from 0.
- `ground_truth`, or verl's ``reward_model.ground_truth``, SkyRL's ``reward_spec.ground_truth``, or TRL's `solution`.
- `agent_name` and `data_source`.

A number that is NaN or infinite becomes null in all other columns, which a warning tells, and is refused in these.
Nothing is ever unpickled: a Parquet column must be made of plain types. Dates, times and decimals become text.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from attrs import define, evolve, field, frozen

from turnwise.errors import DataError
from turnwise.options import DataColumn
from turnwise.types import Task
from turnwise_task_files.messages import kind_of, take_messages
from turnwise_task_files.odd_rows import warn_of_odd_rows
from turnwise_task_files.row_files import FORMATS, Located, read_rows
from turnwise_task_files.values import as_integer, as_object, as_text, encodable, plain, without_nulls

__all__ = ["FORMATS", "read_tasks", "take_tasks", "task_from_row"]

_UID_CHARACTERS: Final = 16
_READ_COLUMNS: Final = frozenset(
    {"messages", "prompt", "conversations", "ground_truth", "uid", "sample_index", "agent_name", "data_source"}
)
"""Columns whose values decide what a task is; one of them that lacks a number is a mistake."""
_NULLABLE_ARGUMENTS: Final = ("tools_kwargs", "interaction_kwargs")
"""Parts of verl's `extra_info` in which a null is a key that only other rows of a Parquet file have."""


def read_tasks(
    path: str | Path,
    *,
    format: str | None = None,
    offset: int = 0,
    limit: int | None = None,
    shuffle_seed: int | None = None,
    columns: Mapping[DataColumn, str | None] | None = None,
) -> list[Task]:
    """
    Read the tasks of a file.

    Args:
        path: a file whose suffix is one of `FORMATS`.
        format: `csv`, `jsonl`, `json` or `parquet`; None goes by the suffix.
        offset: number of tasks to skip at the start, after shuffling.
        limit: most tasks to return; None returns all. Unless shuffled, rows after the last one are not read.
        shuffle_seed: shuffle all tasks by this seed first; None keeps the order of the file.
        columns: the file's names of understood columns, such as ``{"prompt": "question"}``; None ignores a column.

    Returns:
        At least one task; their `uid` differ. A derived `uid` is a hash of the row's messages and index, the same
        wherever the file lies and whichever format it has, and holds neither "_" nor "/".

    Raises:
        DataError: the file cannot be read, or a row of it is no task or has a picture that cannot be read; the text
            names the file and the row.
    """
    file = Path(path)
    found = read_rows(file, format)
    options: Any = {"offset": offset, "limit": limit, "shuffle_seed": shuffle_seed, "columns": columns}
    return take_tasks(str(file), found, folder=file.parent, **options)


def take_tasks(  # noqa: PLR0913 - keywords, each with a default
    place: str,
    found: Iterator[Located],
    *,
    offset: int = 0,
    limit: int | None = None,
    shuffle_seed: int | None = None,
    columns: Mapping[DataColumn, str | None] | None = None,
    folder: Path | None = None,
) -> list[Task]:
    """
    Return the tasks of the rows that were found in a place, such as a file; see `read_tasks`.

    The files of pictures are in `folder`; without one, rows have pictures as `data:` URLs alone.
    """
    if offset < 0:
        raise DataError(f"{place}: 'offset' must be at least 0, not {offset}")
    if limit is not None and limit < 1:
        raise DataError(f"{place}: 'limit' must be at least 1, not {limit}")
    stop = None if limit is None else min(offset + limit, sys.maxsize)
    rows = list(islice(_tasks(found, columns or {}, folder), stop if shuffle_seed is None else None))
    if not rows:
        raise DataError(f"{place}: holds no rows")
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(rows)
    if offset >= len(rows):
        raise DataError(f"{place}: 'offset' {offset} is past its {len(rows)} rows")
    chosen = sorted(rows[offset:stop], key=lambda row: row.number)  # the warnings name the first row of the file
    warn_of_odd_rows([(row.where, row.task.messages, row.holes) for row in chosen])
    return [row.task for row in rows[offset:stop]]


def task_from_row(row: Mapping[str, object], *, row_number: int = 0, where: str = "row") -> Task:
    """Make a task of a row, whose values numpy or pyarrow may have made; `DataError` starts with `where`."""
    return _make_task(row, row_number, where, None, None)


def _make_task(
    row: Mapping[str, object], row_number: int, where: str, holes: list[str] | None, folder: Path | None
) -> Task:
    """Return the task of a row; `holes` gets the columns without a number, None refuses them."""
    values = _plain_row(row, where, holes)
    messages = take_messages(values, where, folder)
    for name in ("reward_model", "reward_spec", "extra_info"):
        if values.get(name) is not None:
            values[name] = as_object(values[name], f"{where}: {name}")
    if values.get("extra_info"):
        values["extra_info"] = _without_foreign_arguments(values["extra_info"])
    index = _take_index(values, row_number, where)
    return Task(
        messages=messages,
        uid=_own_uid(values.pop("uid", None), where) or _content_hash([messages, index]),
        sample_index=index if isinstance(index, int) and 0 <= index < 2**63 else row_number,
        agent_name=as_text(values.pop("agent_name", None), f"{where}: agent_name"),
        ground_truth=_take_truth(values),
        data_source=as_text(values.pop("data_source", None), f"{where}: data_source"),
        extra=values,
    )


def _take_truth(values: dict[str, Any]) -> Any:
    truth = values.pop("ground_truth", None)
    for name in ("reward_model", "reward_spec"):  # of verl and of SkyRL
        if truth is None and isinstance(values.get(name), Mapping):
            truth = values[name].get("ground_truth")
    # TRL's name. Beside an answer, a solution is often the work that leads to it.
    return values.get("solution") if truth is None and "answer" not in values else truth


def _without_foreign_arguments(extra_info: dict[str, Any]) -> dict[str, Any]:
    arguments = {name: without_nulls(extra_info[name]) for name in _NULLABLE_ARGUMENTS if name in extra_info}
    kept: dict[str, object] = extra_info | arguments
    return {name: value for name, value in kept.items() if name not in arguments or value}


def _plain_row(row: Mapping[str, object], where: str, holes: list[str] | None) -> dict[str, Any]:
    found: dict[str, object] = {}
    try:
        for name, value in row.items():
            place, inside = f"{where}: {name}", None if holes is None or name in _READ_COLUMNS else list[str]()
            if name in ("reward_model", "reward_spec") and isinstance(value, Mapping):
                plain(value.get("ground_truth"), f"{place}.ground_truth")
            found[encodable(str(name), where)] = plain(value, place, inside)
            if inside and holes is not None:
                holes.append(str(name))
    except RecursionError:
        raise DataError(f"{where}: nested too deeply") from None
    return found


@frozen
class _Row:
    """A task, its number and place in the file, and its columns that lack a number."""

    number: int
    where: str
    task: Task
    holes: tuple[str, ...]


def _tasks(found: Iterator[Located], columns: Mapping[DataColumn, str | None], folder: Path | None) -> Iterator[_Row]:
    renamed = {name: column for name, column in columns.items() if column is not None}
    first_seen: dict[str, str] = {}
    indexes = _Indexes()
    repeats: Counter[str] = Counter()
    for number, (where, row) in enumerate(found):
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: expected an object, got {kind_of(row)}")
        if missing := sorted(set(renamed.values()) - set(row)):
            raise DataError(f"{where}: has no column {missing[0]!r}; its columns are {', '.join(row)}")
        others = {name: value for name, value in row.items() if name not in {*columns, *renamed.values()}}
        row = others | {name: row[column] for name, column in renamed.items()}
        holes: list[str] = []
        task = _make_task(row, number, where, holes, folder)
        indexes.add(None if row.get("sample_index") is None else task.sample_index, where)
        if row.get("uid") is None:
            # Some data sets repeat a row with its index on purpose: each copy is a separate task.
            repeats[task.uid] += 1
            if repeats[task.uid] > 1:
                task = evolve(task, uid=f"{task.uid}-{repeats[task.uid]}")
        if task.uid in first_seen:
            raise DataError(f"{where}: uid {task.uid!r} is also the uid of {first_seen[task.uid]}")
        first_seen[task.uid] = where
        yield _Row(number, where, task, tuple(holes))


@define
class _Indexes:
    """The rows' own `sample_index`: a file gives each row a different one, or none to any row."""

    first_row: str | None = None
    rows: dict[int, str] = field(factory=dict)

    def add(self, index: int | None, where: str) -> None:
        """Add the index of a row; `DataError` if the file's rows cannot be told apart by their indexes."""
        if self.first_row is not None and (index is None) == bool(self.rows):
            has, lacks = (where, self.first_row) if index is not None else (self.first_row, where)
            raise DataError(f"{lacks}: has no sample_index, but {has} has one; give one to every row or to none")
        self.first_row = self.first_row or where
        if index is None:
            return
        if index in self.rows:
            raise DataError(f"{where}: sample_index {index} is also the sample_index of {self.rows[index]}")
        self.rows[index] = where


def _own_uid(value: object, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise DataError(f"{where}: uid: expected a text that is not empty, got {value!r:.60}")
    return str(value)


def _take_index(values: dict[str, Any], row_number: int, where: str) -> object:
    """Return the index that distinguishes equal rows: `sample_index`, ``extra_info.index`` or the row number."""
    own = as_integer(values.pop("sample_index", None))
    if own is not None:
        if isinstance(own, bool) or not isinstance(own, int) or not 0 <= own < 2**63:
            raise DataError(f"{where}: sample_index: expected an integer from 0 to 2**63 - 1, got {own!r:.60}")
        return own
    given = as_integer((values.get("extra_info") or {}).get("index"))
    return row_number if given is None or isinstance(given, bool) else given


def _content_hash(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_UID_CHARACTERS]
