"""Paths that begin with the home directory of a user whom this machine does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from turnwise.cli import main

ROOT: Final = Path(__file__).parents[1]
CONFIG: Final = str(ROOT / "examples/calculator.yaml")
PLACE: Final = "~no_such_user/x"
KEEPS: Final = ("core/src/turnwise/files.py", "libs/result_files/src/turnwise_result_files/folder_lock.py")
"""The helper, and a comparison that reports the error itself."""


@pytest.mark.parametrize(
    "command",
    [
        *(f"plan CONFIG data.path={PLACE}", f"plan CONFIG model.path={PLACE}", f"plan CONFIG tools_file={PLACE}.json"),
        *(f"plan CONFIG model.chat_template={PLACE}", f"plan CONFIG modules=[{PLACE}.py]"),
        f"plan CONFIG reward={PLACE}.py:score",
        f"convert TASKS --to sft --model {PLACE} --out OUT",
    ],
)
def test_an_unknown_user_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has the path as the config or the command line has it."""
    (tmp_path / "tasks.jsonl").write_text('{"messages": []}\n')
    places = {"CONFIG": CONFIG, "TASKS": str(tmp_path / "tasks.jsonl"), "OUT": str(tmp_path / "out")}

    assert main([places.get(word, word) for word in command.split()]) == 2

    printed = capsys.readouterr().err
    assert PLACE in printed
    assert "~no_such_user has no home directory on this machine" in printed
    assert 1 == len(printed.splitlines())


def test_every_path_is_expanded_by_the_helper() -> None:
    """`Path.expanduser` raises `RuntimeError`, which no caller expects."""
    found = [file for part in ("core", "libs", "plugins") for file in (ROOT / part).glob("**/src/**/*.py")]
    direct = [str(file.relative_to(ROOT)) for file in found if ".expanduser()" in file.read_text(encoding="utf-8")]
    assert sorted(KEEPS) == sorted(direct)
