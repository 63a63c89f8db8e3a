"""Random vision-language models for tests."""

from typing import get_args

import pytest
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from turnwise_tiny_models import VisionKind, VisionSizes, save_random_vision


@pytest.mark.parametrize("kind", get_args(VisionKind))
def test_a_model_is_the_same_each_time(kind, tmp_path):
    """Two folders have equal weights, and transformers loads model and image processor."""
    sizes = VisionSizes(hidden_size=32, num_layers=1, num_vision_layers=1)

    first, second = (
        AutoModelForImageTextToText.from_pretrained(save_random_vision(kind, tmp_path / name, sizes)).state_dict()
        for name in ("first", "second")
    )

    assert first.keys() == second.keys()
    assert all(bool((weight == second[name]).all()) for name, weight in first.items())
    assert AutoImageProcessor.from_pretrained(tmp_path / "first", use_fast=False).patch_size == sizes.patch_size
