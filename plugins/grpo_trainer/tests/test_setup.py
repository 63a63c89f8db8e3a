"""What cannot be trained is refused at the start, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.errors import ConfigError
from turnwise_grpo_trainer.setup import read_setup

EXAMPLE = Path(__file__).parents[3] / "examples/train_calculator.yaml"


@pytest.mark.parametrize("mode", ["sync", "hybrid", "async"])
def test_dynamic_sampling_of_groups_of_one(mode):
    """They never have variance, so none would be kept."""
    overrides = (
        f"train.mode={mode}",
        "rollout.n=1",
        "train.algorithm.adv_estimator=reinforce_plus_plus",
        "train.buffer.dynamic_sampling=true",
    )

    with pytest.raises(ConfigError, match=r"train\.buffer\.dynamic_sampling: needs rollout\.n of at least 2") as caught:
        read_setup(str(EXAMPLE), overrides)
    assert 1 == len(str(caught.value).splitlines())
    assert read_setup(str(EXAMPLE), overrides[:-1]).group_size == 1
