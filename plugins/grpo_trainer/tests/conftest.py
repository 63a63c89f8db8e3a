"""A tiny model, and batches for it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from turnwise import ModelSpec
from turnwise_testing.references.reference_model import random_qwen3

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this file

from made_batches import VOCABULARY, conversation, ids, make_batch, parallel, sample_group


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """Directory of a Qwen3 model with two layers and random weights."""
    folder = tmp_path_factory.mktemp("model")
    random_qwen3(VOCABULARY).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def spec(model_dir):
    """The tiny model as a `ModelSpec`."""
    return ModelSpec(path=model_dir)


@pytest.fixture
def conversations():
    """Eight conversations in two groups."""
    rng = np.random.default_rng(0)
    return make_batch([conversation(rng) for _ in range(8)])


@pytest.fixture
def rewarded():
    """A function that returns conversations in groups of four with given rewards."""
    rng = np.random.default_rng(3)
    return lambda rewards: make_batch([conversation(rng) for _ in rewards], [float(reward) for reward in rewards])


@pytest.fixture
def mixed():
    """Eight rows, every other one with parallel paths."""
    rng = np.random.default_rng(1)
    return make_batch([parallel(rng) if number % 2 else conversation(rng) for number in range(8)])


@pytest.fixture
def grouped():
    """Two groups of eight rows, each of one prompt of twenty tokens."""
    rng = np.random.default_rng(2)
    return make_batch([record for _ in range(2) for record in sample_group(rng, ids(rng, 20), 8)], group_size=8)
