"""Tests of the demo's task files."""

import json

import pytest

from turnwise_parallel_thinking.demo.sums import main


def write(path, *options):
    """Run the command, and return the rows of its file."""
    main([*options, "--out", str(path)])
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_command_writes_distinct_sums_of_the_given_length(tmp_path):
    """A file has distinct sums of five numbers and their values, the same ones each time."""
    options = ["--lengths", "5", "--num", "256"]
    rows = write(tmp_path / "sums.jsonl", *options)

    assert rows == write(tmp_path / "again.jsonl", *options)
    assert {row["extra_info"]["num_numbers"] for row in rows} == {5}
    assert len({row["prompt"][0]["content"] for row in rows}) == len(rows) == 256
    for row in rows:
        numbers = row["prompt"][0]["content"].removeprefix("What is ").rstrip("?").split(" + ")
        assert str(sum(map(int, numbers))) == row["reward_model"]["ground_truth"]


def test_no_sum_is_trained_on_and_held_out(tmp_path):
    """No held-out sum is a training sum in another order."""
    seen = [
        {
            tuple(sorted(row["prompt"][0]["content"].removeprefix("What is ").rstrip("?").split(" + ")))
            for row in write(tmp_path / split, "--split", split, "--lengths", "5", "--num", "256")
        }
        for split in ("train", "test")
    ]
    assert not seen[0] & seen[1]


def test_too_many_sums_are_refused(tmp_path, capsys):
    """There are 81 sums of two numbers, so the command refuses to write 82."""
    with pytest.raises(SystemExit):
        main(["--lengths", "2", "--num", "82", "--out", str(tmp_path / "sums.jsonl")])
    assert "--num is 82, but there are only 81 such sums" in capsys.readouterr().err
