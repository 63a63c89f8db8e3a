"""A few tasks in the leaderboard's form, and episodes of them."""

from __future__ import annotations

import json
from pathlib import Path

from turnwise_bfcl.source import BfclSource
from turnwise_task_files.rows import task_from_row

DATA = Path(__file__).parent / "data"


def text_of(categories: str, **options: object) -> str:
    """Return a text for the source, with the folder of these tasks."""
    given = {"folder": DATA, **options}
    return f"{categories}?" + "&".join(f"{name}={value}" for name, value in given.items())


def tasks_of(categories: str):
    """Return the tasks of categories."""
    return [task_from_row(row, row_number=number) for number, row in enumerate(BfclSource().rows(text_of(categories)))]


def written(*calls: tuple[str, dict]) -> str:
    """Return a turn with calls in the format of Hermes."""
    return "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>" for name, arguments in calls
    )
