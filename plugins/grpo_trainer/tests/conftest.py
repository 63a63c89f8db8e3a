"""A tiny model, and batches for it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise import ModelSpec

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this file

from made_batches import VOCABULARY, conversation, ids, make_batch, parallel, sample_group


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """Directory of a Qwen3 model with two layers and random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)  # otherwise attention is nearly uniform
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
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
