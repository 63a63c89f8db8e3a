"""A training that is killed while it writes a checkpoint resumes from the one before, and learns the same bits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from training_site import assert_same, make_site, start, train

from turnwise_grpo_trainer.loop.checkpoints import CheckpointStore, check_checkpoint
from turnwise_testing.whole_runs.installation import install_plugin

pytestmark = pytest.mark.slow

KILLED = Path(__file__).with_name("turnwise_killed.py")
STEPS = ("train.num_steps=3", "data.validation_path=null")
MIDDLES = (
    "1 shard",
    "4096 shard",
    "1000003 shard",
    "7690000 shard",  # of 7.7 MB
    "9000 random",
    "1 loop.json",
    "1000 loop.json",
    "200 checksums",
)
"""Places in the middle of each file of a checkpoint."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder to train in."""
    install_plugin(make_site(tmp_path), "turnwise_killed", KILLED.read_text(encoding="utf-8"), entry="killed")
    return tmp_path


def train_until_killed(site: Path, place: str) -> bool:
    """Start or resume a training that is killed at a place of the save; return whether it was."""
    out = site / "cut"
    resume = ["--resume"] if CheckpointStore(out).paths() else []
    process = start(
        site, "train", str(site / "config.yaml"), *STEPS, "--out", str(out), *resume, TURNWISE_TEST_SAVE=place
    )
    output = process.communicate()
    assert process.returncode in (-signal.SIGXFSZ, 0), output
    for checkpoint in CheckpointStore(out).paths():
        check_checkpoint(checkpoint)
    return process.returncode != 0


def test_killed_in_the_middle_of_each_file(site: Path) -> None:
    """Of the weights and the optimizer, of random states, of the progress and of the checksums."""
    whole = train(site, "whole", *STEPS)
    for place in MIDDLES:
        assert train_until_killed(site, place), place
        partial = site / "cut" / "checkpoints" / "step-00000002.partial"
        number, name = place.split()
        # safetensors writes to a hidden file, which gets its name when it is complete.
        (file,) = [each for each in partial.rglob("*") if (".tmp" if name == "shard" else name) in each.name]
        assert file.stat().st_size <= int(number)
        assert [each.name for each in CheckpointStore(site / "cut").paths()] == ["step-00000001"]
    assert_same(whole, train(site, "cut", *STEPS, "--resume"))
