"""The run of a user of verl, before and after the move in `examples/from_verl`: few lines change, and it runs."""

import difflib
import importlib.util
import shutil
from pathlib import Path

import pytest

from turnwise.cli import main

EXAMPLE = Path(__file__).parents[3] / "examples/from_verl"
PARTS = ("tools.yaml", "my_tools.py", "my_reward.py", "my_loop.py", "train.jsonl")
MOST_LINES = 10


def changed_lines(name):
    """Return the lines of a file after the move that it did not have before, and the number of removed ones."""
    before, after = (EXAMPLE / folder / name for folder in ("before", "after"))
    lines = before.read_text(encoding="utf-8").splitlines() if before.exists() else []
    found = list(difflib.ndiff(lines, after.read_text(encoding="utf-8").splitlines()))
    added = [line[2:] for line in found if line.startswith("+ ") and line[2:].strip()]
    return added, sum(line.startswith("- ") for line in found)


def test_the_move_changes_at_most_ten_lines():
    """Tools, reward, reward manager, loop and data of the user, and the whole new config."""
    added, removed = zip(*(changed_lines(name) for name in (*PARTS, "run.yaml")), strict=True)

    assert sum(map(len, added)) <= MOST_LINES
    assert sum(removed) == 0
    assert {each.name for each in (EXAMPLE / "after").iterdir() if each.is_file()} == {*PARTS, "run.yaml"}


@pytest.mark.verl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed here")
def test_the_moved_run_gives_rewards(tmp_path, monkeypatch):
    """The model calls verl's tool in verl's loop, and the reward manager scores its answers."""
    from turnwise_result_files import read_results

    shutil.copytree(EXAMPLE / "after", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as PYTHONPATH=. does, for the tool's module

    assert main(["rollout", "run.yaml", "--out", "out"]) == 0

    results = list(read_results(tmp_path / "out"))
    assert len(results) == 16
    assert {len(result.trajectories) for result in results} == {1}
    assert max(result.reward for result in results) == 1.0
    assert any("<tool_response>" in message["content"] for result in results for message in result.messages)
    assert {"numbers", "too_long"} <= results[0].metrics.extra.keys()
