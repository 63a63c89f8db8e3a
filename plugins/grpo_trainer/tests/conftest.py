"""A tiny model, and hand-made batches."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise import EpisodeResult, ModelSpec, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate

sys.path.insert(0, str(Path(__file__).parent))  # for `float_reference`

VOCABULARY = 40


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


def ids(rng, num):
    """Return random token ids."""
    return rng.integers(0, VOCABULARY, num)


def logprobs(rng, num):
    """Return random log-probabilities."""
    return -rng.random(num).astype(np.float32)


def conversation(rng):
    """Return a record of two turns, each followed by an observation."""
    record = Trajectory(ids(rng, int(rng.integers(2, 6))))
    for _ in range(2):
        num = int(rng.integers(2, 7))
        record.add_action(ids(rng, num), logprobs(rng, num))
        record.add_observation(ids(rng, int(rng.integers(1, 4))))
    return record


def parallel(rng):
    """Return a record with a block of three parallel paths, and a summary after it."""
    record = Trajectory(ids(rng, 4))
    record.add_action(ids(rng, 2), logprobs(rng, 2))
    paths = record.fork(3)
    for path in paths:
        num = int(rng.integers(2, 5))
        path.add_action(ids(rng, num), logprobs(rng, num))
    record.join(paths)
    record.add_forced(ids(rng, 1))
    record.add_action(ids(rng, 3), logprobs(rng, 3))
    return record


def make_result(record, *, uid="a", rollout_n=0, reward=0.0, status=Status.COMPLETED):
    """Return an episode with one record."""
    return EpisodeResult(
        task=Task(messages=({"role": "user", "content": "?"},), uid=uid),
        rollout_n=rollout_n,
        status=status,
        trajectories=(record,),
        scores=(TrajectoryScore(value=reward),),
    )


def make_batch(records, rewards=None, *, group_size=4):
    """Return a batch of groups."""
    rewards = [float(number % 3) for number in range(len(records))] if rewards is None else rewards
    return collate(
        [
            make_result(record, uid=f"t{number // group_size}", rollout_n=number % group_size, reward=reward)
            for number, (record, reward) in enumerate(zip(records, rewards, strict=True))
        ],
        pad_token_id=0,
    )


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
