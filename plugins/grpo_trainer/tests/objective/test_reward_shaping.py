"""The soft overlong punishment by the paper's formula, and shuffled rewards as a control."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from made_batches import advantages_of

from turnwise import EpisodeResult, Status, Task, Trajectory, TrajectoryScore
from turnwise.batch.rollout_batch import collate
from turnwise.cli import main
from turnwise_grpo_trainer.config import AlgorithmConfig, OverlongConfig
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.reward_shaping import overlong_punishment, punish_overlong, shuffle_rewards

EXAMPLE = str(Path(__file__).parents[4] / "examples/train_calculator.yaml")


def equation_13(length, max_length, cache_length):
    """Return R_length(y), case by case as in the paper."""
    if length <= max_length - cache_length:
        return 0.0
    if length <= max_length:
        return ((max_length - cache_length) - length) / cache_length
    return -1.0


@given(data=st.data(), max_length=st.integers(1, 20_480))
def test_the_formula(data, max_length):
    """The tensor is the paper's formula, for every length around and beyond the limits."""
    cache_length = data.draw(st.integers(1, max_length))
    edges = [max_length - cache_length, max_length - cache_length + 1, max_length - 1, max_length, max_length + 1]
    lengths = [0, *edges, *data.draw(st.lists(st.integers(0, 2 * max_length)))]

    found = overlong_punishment(torch.tensor(lengths), max_length=max_length, cache_length=cache_length)

    expected = [equation_13(length, max_length, cache_length) for length in lengths]
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_figures_of_the_paper():
    """L_max is 20,480 and L_cache 4,096 there: 16,384 tokens are free, and half of the cache costs one half."""
    lengths = torch.tensor([16_384, 18_432, 20_480, 20_481])

    assert [0, -0.5, -1, -1] == overlong_punishment(lengths, max_length=20_480, cache_length=4_096).tolist()


@given(st.lists(st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans()), min_size=1, max_size=6))
def test_an_episode_is_punished_once(shapes):
    """
    An episode's reward changes by the punishment of its longest row; observations count, unscored episodes are left.

    The rewards of tokens change by the same sum, and so does the reward of each of its rows.
    """
    batch = make_batch([(lengths, 1.0 if scored else None) for lengths, scored in shapes])

    punished, metrics = punish_overlong(batch, OverlongConfig(cache_length=4, factor=0.5), 8)

    expected = [0.5 * equation_13(max(lengths) + 2, 8, 4) if scored else 0.0 for lengths, scored in shapes]
    added = punished.episode_rewards - batch.episode_rewards
    assert added.tolist() == pytest.approx([expected[episode] for episode in batch.episode_index.tolist()])
    by_token = (punished.rm_scores - batch.rm_scores).sum(1)
    totals = torch.zeros(len(shapes)).index_add(0, batch.episode_index, by_token)
    assert totals.tolist() == pytest.approx(expected)
    assert not (punished.rm_scores - batch.rm_scores)[~batch.response_mask.bool()].any()
    num_scored = max(1, sum(scored for _, scored in shapes))
    assert sum(expected) / num_scored == pytest.approx(metrics["overlong/mean"])
    assert sum(each < 0 for each in expected) / num_scored == pytest.approx(metrics["overlong/share"])


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_long_answers_lose_advantage(estimator):
    """Of equally right answers, the longer has the lower advantage, and without the punishment no answer has one."""
    batch = make_batch([([2], 1.0), ([5], 1.0), ([7], 1.0)])
    config = AlgorithmConfig(adv_estimator=estimator)

    def advantages(batch):
        found = advantages_of(batch, config, mask=compute_loss_mask(batch)).values
        return [row[mask.bool()][0].item() for row, mask in zip(found, batch.response_mask, strict=True)]

    assert [0, 0, 0] == pytest.approx(advantages(batch), abs=1e-4)
    short, middle, long = advantages(punish_overlong(batch, OverlongConfig(cache_length=6), 8)[0])
    assert short > middle > long


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{cache_length: 161}", "train.algorithm.overlong.cache_length: must be at most max_length, which is"),
        ("{cache_length: 9, max_length: 8}", "train.algorithm.overlong.cache_length: must be at most max_length"),
        ("{cache_length: 0}", "train.algorithm.overlong.cache_length: must be >= 1: 0"),
        ("{factor: 1.0}", "train.algorithm.overlong.cache_length: missing"),
    ],
)
def test_a_wrong_config(capsys, options, message):
    """Each is one line, before anything is loaded."""
    assert 2 == main(["train", EXAMPLE, "--dry-run", f"train.algorithm.overlong={options}"])

    (line,) = capsys.readouterr().err.splitlines()
    assert f"turnwise: error: {EXAMPLE}: {message}" in line


def make_batch(shapes):
    """Return a batch of one group: for each episode the sampled tokens of its records, and its reward or None."""
    rng = np.random.default_rng(0)
    episodes = []
    for number, (lengths, reward) in enumerate(shapes):
        records = []
        for length in lengths:
            record = Trajectory(rng.integers(0, 40, 3))
            record.add_action(rng.integers(0, 40, length), -rng.random(length).astype(np.float32))
            record.add_observation([1, 2])
            records.append(record)
        scores = (TrajectoryScore(value=reward), *[TrajectoryScore(value=0.0) for _ in records[1:]])
        episodes.append(
            EpisodeResult(
                task=Task(messages=({"role": "user", "content": "?"},), uid="t"),
                rollout_n=number,
                status=Status.COMPLETED,
                trajectories=tuple(records),
                scores=() if reward is None else scores,
            )
        )
    return collate(episodes, pad_token_id=0)


@given(seed=st.integers(0, 20))
def test_shuffled_rewards_are_a_permutation(seed):
    """The control keeps the rewards of the batch, moves them to other rows, and repeats itself for a seed."""
    batch = make_rewarded_batch([1, 2, 3, 4, 5, 6])

    shuffled = shuffle_rewards(batch, seed)

    totals = shuffled.rm_scores.sum(1)
    assert [1, 2, 3, 4, 5, 6] == sorted(totals.tolist())
    assert torch.equal(totals, shuffle_rewards(batch, seed).rm_scores.sum(1))
    for row in range(6):
        (place,) = shuffled.rm_scores[row].nonzero().flatten().tolist()
        assert place == int(batch.response_mask[row].nonzero().max())


def test_shuffled_rewards_of_rows_without_actions():
    """A row without a sampled token has no token for its reward; an unscored one passes its lack of a score on."""
    batch = make_rewarded_batch([1, 2, 3, 4, 5, 6])
    scored = batch.scored.clone()
    scored[0] = False
    silent = batch.response_mask.clone()
    silent[2] = 0

    shuffled = shuffle_rewards(evolve(batch, scored=scored, response_mask=silent), seed=1)

    assert not shuffled.rm_scores[2].any()
    assert [1, 2, 3, 4, 5, 6] == sorted(shuffled.episode_rewards.tolist())
    assert 5 == int(shuffled.scored.sum())
    assert 1.0 == shuffled.episode_rewards[~shuffled.scored].item()
    assert not shuffled.scored.equal(scored)


def test_seeds_shuffle_differently():
    """Different steps get different permutations."""
    batch = make_rewarded_batch(range(1, 7))

    orders = {tuple(shuffle_rewards(batch, seed).rm_scores.sum(1).tolist()) for seed in range(10)}

    assert len(orders) > 5


def make_rewarded_batch(rewards):
    """Return a batch with these rewards of its rows."""
    rng = np.random.default_rng(0)
    episodes = []
    for number, reward in enumerate(rewards):
        record = Trajectory(rng.integers(0, 40, 3))
        length = int(rng.integers(1, 5))
        record.add_action(rng.integers(0, 40, length), -rng.random(length).astype(np.float32))
        record.add_observation([1, 2])
        episodes.append(
            EpisodeResult(
                task=Task(messages=({"role": "user", "content": "?"},), uid="t"),
                rollout_n=number,
                status=Status.COMPLETED,
                trajectories=(record,),
                scores=(TrajectoryScore(value=float(reward)),),
            )
        )
    return collate(episodes, pad_token_id=0)
