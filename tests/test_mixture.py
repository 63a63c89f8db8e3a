"""Trainings on several files with weights, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_site import make_site, start, steps_of, train, write_tasks

from turnwise_result_files import read_training_step

MIXTURE = ("data.path=null", "data.sources=[{path: tasks.jsonl, weight: 2}, {path: other.jsonl, name: extra}]")


@pytest.mark.slow
def test_a_mixture_is_resumed_exactly(tmp_path: Path) -> None:
    """
    Each step has two groups of the heavier file and one of the other, and a resume continues to the bit.

    Logs and episodes have the source of each row. Both files have tasks of the same uids.
    """
    site = make_site(tmp_path)
    write_tasks(site / "other.jsonl", 4)
    whole = train(site, "whole", *MIXTURE)
    parts = train(site, "parts", *MIXTURE, "train.num_steps=2")
    (parts / "report.md").unlink()
    train(site, "parts", *MIXTURE, "--resume")

    steps = [line for line in steps_of(whole) if "reward/mean" in line]
    assert 3 == len(steps)
    for step in steps:
        assert (2 / 3, 1 / 3) == pytest.approx((step["source/tasks/share"], step["source/extra/share"]))
        mean = (2 * step["source/tasks/reward"] + step["source/extra/reward"]) / 3
        assert mean == pytest.approx(step["reward/mean"])
    assert steps == [line for line in steps_of(parts) if "reward/mean" in line]
    episodes = [each.result for each in read_training_step(whole / "episodes" / "step-00000001.parquet")]
    assert {"tasks", "extra"} == {episode.task.data_source for episode in episodes}


def test_a_file_is_missing(tmp_path: Path) -> None:
    """The error is one line with exit code 2, before a model is loaded."""
    process = start(make_site(tmp_path), "train", str(tmp_path / "config.yaml"), *MIXTURE, "--dry-run")
    _, err = process.communicate()

    assert 2 == process.returncode, err
    (line,) = [line for line in err.splitlines() if line.startswith("turnwise: error:")]
    assert line == f"turnwise: error: {tmp_path / 'other.jsonl'}: no such file"
