"""A training that cannot learn says so at its first step, on the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from training_site import make_site, start

FLAT = "def flat(episode):\n    return 0.0\n\n\ndef varied(episode):\n    return episode.rollout_n\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder to train in, with a reward that is always 0."""
    (tmp_path / "flat.py").write_text(FLAT, encoding="utf-8")
    return make_site(tmp_path)


def train_lines(site: Path, *overrides: str) -> str:
    """Train, and return the log and the summary."""
    arguments = ("train", str(site / "config.yaml"), "--out", str(site / "out"), "train.num_steps=2", *overrides)
    process = start(site, *arguments)
    out, err = process.communicate()
    assert 0 == process.returncode, err
    return err + out


@pytest.mark.slow
def test_equal_rewards_and_truncations_are_reported_at_the_first_step(site: Path) -> None:
    """One warning each names the keys to change; no number is `nan`, and no 0 has a sign."""
    lines = train_lines(site, "reward=./flat.py:flat", "modules=[./flat.py]", "rollout.response_length=1")
    found = re.findall(r"step \d+: in no group do the rewards differ[^\"\n]*", lines)
    assert 1 == len(found), lines
    assert found[0].startswith("step 1: in no group do the rewards differ (their mean is 0)")
    assert "raise rollout.n or rollout.sampling.temperature" in found[0]
    assert "nan" not in re.sub(r"[a-z_]nan|nan[a-z_]", "", lines)
    assert "-0.0" not in lines
    found = re.findall(r"step \d+: [^\"\n]* were truncated [^\"\n]*", lines)
    assert 1 == len(found), lines
    assert re.match(r"step 1: \d+% of the episodes were truncated \(\d+% by rollout.response_length\); raise", found[0])


@pytest.mark.slow
def test_rewards_that_differ_are_not_reported(site: Path) -> None:
    """A reward that differs within the groups is no reason for the warning."""
    assert "in no group" not in train_lines(site, "reward=./flat.py:varied", "modules=[./flat.py]")
