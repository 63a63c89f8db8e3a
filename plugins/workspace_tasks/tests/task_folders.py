"""Writes folders of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples/shell_tasks"
PASS = (
    "#!/bin/sh\ngrep -qx done answer.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
)


def write_task(folder: Path, files: Mapping[str, str | bytes] | None = None, without: str = "") -> Path:
    """
    Write a task whose solution writes `done` to `answer.txt`, and return its folder.

    Args:
        folder: of the task.
        files: contents by path, besides the usual ones or in place of them.
        without: path of a usual file that is left out.
    """
    usual = {
        "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 20.0\n',
        "instruction.md": "Write `done` to answer.txt.\n",
        "environment/hint.txt": "done\n",
        "tests/test.sh": PASS,
        "solution/solve.sh": "echo done > answer.txt\n",
    }
    for path, content in {**usual, **(files or {})}.items():
        if path != without:
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder
