"""
The ends of runs tell the truth: some cells of the matrix in `end_cells.py`.

`make ends` runs all of them, and writes the page `docs/reference/ends.md`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from end_cells import FAULTS, KNOWN, MOMENTS, Cell, all_cells
from end_checks import find_problems
from end_runs import run_cell, write_site

pytestmark = pytest.mark.usefixtures("starts_a_process")

QUICK = {"rollout local, writing, SIGTERM"}
SLOW = {
    "rollout local, running, SIGINT",
    "rollout local, running, folder gone",
    "rollout local, writing, full disk",
    "rollout local, starting, SIGINT twice",
    "rollout local, running, SIGINT twice",
    "rollout local, running, full disk",
    "rollout local, writing, SIGKILL",
    "rollout local, closing, SIGINT",
    "eval local, writing, SIGINT",
    "eval local, running, full disk",
    "train local, running, SIGINT",
    "train local, first checkpoint, SIGKILL",
    "train local, running, full disk",
    "train local, first checkpoint, full disk",
    "train local, running, folder gone",
    "sft local, running, SIGINT",
    "sft local, writing, full disk",
    "serve local, running, full disk",
    "serve local, running, folder gone",
    "serve local, writing, SIGKILL",
}
ON_RAY = {
    "rollout ray, starting, SIGTERM",
    "rollout ray, starting, GCS killed",
    "rollout ray, running, SIGKILL",
    "rollout ray, writing, raylet stopped",
    "rollout ray, writing, GCS killed",
    "rollout ray, closing, SIGINT",
}


def chosen() -> Iterator[object]:
    """Yield the cells that the tests run, with their marks."""
    for cell in all_cells():
        if str(cell) in QUICK | SLOW | ON_RAY:
            marks = [] if str(cell) in QUICK else [pytest.mark.slow]
            yield pytest.param(cell, id=str(cell), marks=[*marks, *([pytest.mark.ray] if str(cell) in ON_RAY else [])])


@pytest.mark.parametrize("cell", list(chosen()))
def test_an_end_tells_the_truth(cell: Cell, tmp_path: Path) -> None:
    """Its exit code, its last line and its folder agree, nothing is left, and the same command again completes it."""
    site = write_site(tmp_path / "site", cell.command, cell.runtime)

    outcome = run_cell(cell, site, tmp_path / "cell")

    assert [] == find_problems(outcome), f"{outcome.first.error}\n{[each.error for each in outcome.resumed]}"


def test_every_cell_exists_or_says_why_not() -> None:
    """The matrix is whole, and the cells of the tests are in it."""
    cells = list(all_cells())
    assert len(set(cells)) == len(cells) == 10 * len(MOMENTS) * len(FAULTS[1:]) + 8
    names = {str(cell) for cell in cells if not cell.missing()}
    assert names >= QUICK | SLOW | ON_RAY | KNOWN.keys()
    assert all(cell.place.function for cell in cells if not cell.missing())
