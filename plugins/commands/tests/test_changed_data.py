"""A run is not resumed with other data than it began with."""

from __future__ import annotations

import json

import pytest
from cli_runs import rollout

from turnwise.cli import main
from turnwise_result_files import read_results

ROWS = [
    {
        "uid": f"t{number}",
        "prompt": f"What is {number} + 1?",
        "ground_truth": number + 1,
        "extra_info": {"level": number},
    }
    for number in range(4)
]


def write(run_dir, rows):
    (run_dir / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


CHANGES = {
    "a prompt": lambda rows: rows[2].update(prompt="What is 9 + 1?"),
    "a truth": lambda rows: rows[2].update(ground_truth=0),
    "another column": lambda rows: rows[2]["extra_info"].update(level=9),
    "the data source": lambda rows: rows[2].update(data_source="school"),
    "a removed row": lambda rows: rows.pop(2),
    "another uid": lambda rows: rows[2].update(uid="other"),
}


@pytest.mark.many_cases(4)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("part", ["complete", "cut off"])
def test_changed_rows_are_refused(run_dir, capsys, change, part):
    """The line names the row or the episode, and the results stay as they were."""
    write(run_dir, ROWS)
    assert rollout(run_dir, "data.path=rows.jsonl") == 0
    out = run_dir / "out"
    if part == "cut off":
        (out / "metrics.json").unlink()
    before = (out / "trajectories.parquet").read_bytes()
    rows = json.loads(json.dumps(ROWS))
    change(rows)
    write(run_dir, rows)
    capsys.readouterr()

    assert main(["rollout", "--resume", str(out)]) == 2

    error = capsys.readouterr().err
    assert "row 2 has changed" in error or "is none of this run's" in error
    assert (out / "trajectories.parquet").read_bytes() == before


def test_the_same_rows_are_no_change(run_dir):
    """Another order of keys, and values that Parquet and JSON write differently, are the same row."""
    write(run_dir, [{**row, "scores": [1, 2.5, None], "empty": {}} for row in ROWS])
    assert rollout(run_dir, "data.path=rows.jsonl") == 0
    write(run_dir, [dict(reversed({**row, "scores": [1, 2.5, None], "empty": {}}.items())) for row in ROWS])
    assert main(["rollout", "--resume", str(run_dir / "out")]) == 0
    assert len(read_results(run_dir / "out" / "trajectories.parquet")) == 8
