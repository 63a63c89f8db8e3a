"""Tests of the demo's task files."""

import json
from pathlib import Path

import pytest

from turnwise_parallel_thinking.demo.sums import main

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("train_parallel", ["--lengths", "5", "--num", "256"]),
        ("heldout_parallel", ["--split", "test", "--lengths", "5", "--num", "48"]),
    ],
)
def test_the_command_writes_the_files_of_the_example(tmp_path, name, options):
    """The command reproduces the files of the example, which have distinct sums of five numbers."""
    path = tmp_path / "sums.jsonl"
    main([*options, "--out", str(path)])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    assert path.read_text(encoding="utf-8") == (EXAMPLES / f"{name}.jsonl").read_text(encoding="utf-8")
    assert {row["extra_info"]["num_numbers"] for row in rows} == {5}
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows)


def test_no_sum_is_trained_on_and_held_out():
    """No held-out sum is a training sum in another order."""
    seen = [
        {
            tuple(sorted(row["prompt"][0]["content"].removeprefix("What is ").rstrip("?").split(" + ")))
            for row in map(json.loads, (EXAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
        }
        for name in ("train_parallel", "heldout_parallel")
    ]
    assert not seen[0] & seen[1]


def test_too_many_sums_are_refused(tmp_path, capsys):
    """There are 81 sums of two numbers, so the command refuses to write 82."""
    with pytest.raises(SystemExit):
        main(["--lengths", "2", "--num", "82", "--out", str(tmp_path / "sums.jsonl")])
    assert "--num is 82, but there are only 81 such sums" in capsys.readouterr().err
