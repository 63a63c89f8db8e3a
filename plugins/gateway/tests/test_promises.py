"""The table of promises names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]
ROOT = FOLDER.parents[1]
TABLE = FOLDER / "PROMISES.md"
NAMED = re.findall(r"`([\w./]+\.py)::(\w+)`", TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED)))
def test_named_test_exists(path: str, name: str) -> None:
    """Each test in the table is a function of its file."""
    file = ROOT / path[1:] if path.startswith("/") else FOLDER / path
    tree = ast.parse(file.read_text(encoding="utf-8"))

    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_promise_has_a_row() -> None:
    """The rows are numbered without a gap, and a row without a test says so."""
    rows = [line.split("|") for line in TABLE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d", line)]

    assert list(range(1, 47)) == [int(row[1]) for row in rows]
    assert all("::" in row[3] or row[4].strip() for row in rows)
