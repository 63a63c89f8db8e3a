"""A training is not resumed with other data than it began with, and new orders are those of an undisturbed one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_site import make_site, run, train

SHORT = ("train.num_steps=1", "data.validation_path=held_out.jsonl", "train.diagnostics.noise_scale=false")


@pytest.mark.slow
def test_changed_rows(tmp_path: Path) -> None:
    """
    Changed tasks are refused in one line, although their number is the same.

    Changed held-out tasks are told, because their scores do not compare; the training goes on.
    """
    site = make_site(tmp_path)
    tasks, held_out = site / "tasks.jsonl", site / "held_out.jsonl"
    original = tasks.read_text()
    held_out.write_text(original)
    out = train(site, "out", *SHORT)
    command = ("train", str(site / "config.yaml"), *SHORT[1:], "train.num_steps=2", "--out", str(out), "--resume")

    tasks.write_text(original.replace("What is 3 + 1?", "What is 4 + 1?"))
    refused = run(site, *command)
    (line,) = [each for each in refused.splitlines() if "cannot resume" in each]
    assert "rows of the data set have changed since the checkpoint; restore the data set, or train anew" in line
    assert not (out / "checkpoints" / "step-00000002").exists()

    tasks.write_text(original)
    held_out.write_text(json.dumps({"prompt": "What is 5 + 5?"}) + "\n")
    assert "the held-out tasks have changed" in run(site, *command)
    assert (out / "checkpoints" / "step-00000002").exists()


@pytest.mark.slow
def test_too_many_tasks_per_step(tmp_path: Path) -> None:
    """A step cannot have more tasks than there are; the line has both numbers."""
    site = make_site(tmp_path)
    output = run(site, "train", str(site / "config.yaml"), "train.tasks_per_step=6", "--out", str(site / "out"))
    assert "train.tasks_per_step: 6 is more than the 5 tasks" in output
    assert not (site / "out").exists()
