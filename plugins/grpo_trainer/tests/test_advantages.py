"""The estimators do what their papers say, told again in plain Python."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise_grpo_trainer import advantages as estimators

REWARDS = st.lists(st.tuples(st.integers(0, 3), st.floats(-4, 4, width=16), st.booleans()), min_size=1, max_size=12)


def columns(rows):
    """Return rewards, groups and valid flags as tensors, groups numbered from 0."""
    numbers = {}
    groups = [numbers.setdefault(group, len(numbers)) for group, _, _ in rows]
    return (
        torch.tensor([reward for _, reward, _ in rows]),
        torch.tensor(groups),
        torch.tensor([valid for _, _, valid in rows]),
    )


def others(rows, number):
    """Return the rewards of the valid rows of a row's group."""
    return [reward for group, reward, valid in rows if valid and group == rows[number][0]]


@given(rows=REWARDS)
def test_grpo(rows):
    """A row's reward less its group's mean, over its group's deviation; Dr. GRPO leaves out the division."""
    rewards, groups, valid = columns(rows)
    expected, plain = [], []
    for number, (_, reward, is_valid) in enumerate(rows):
        group = others(rows, number)
        centred = reward - statistics.fmean(group) if is_valid and len(group) > 1 else 0.0
        deviation = statistics.stdev(group) if len(group) > 1 else 0.0
        plain.append(centred)
        expected.append(centred / (deviation + estimators.EPSILON))

    np.testing.assert_allclose(estimators.grpo(rewards, groups, valid, norm_adv_by_std=False), plain, atol=1e-5)
    actual = estimators.grpo(rewards, groups, valid)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@given(reward=st.floats(-1e4, 1e4, width=32), size=st.integers(1, 40))
def test_equal_rewards_say_nothing(reward, size):
    """Not even by the rounding of their mean, which the division by their deviation would make large."""
    rewards, groups = torch.full((size,), reward), torch.zeros(size, dtype=torch.long)
    mask = torch.ones(size, 1)

    assert not estimators.grpo(rewards, groups, mask[:, 0].bool()).any()
    assert not estimators.whitened(rewards[:, None], mask).any()


@given(rows=REWARDS)
def test_rloo(rows):
    """A row's reward less the mean of the others of its group."""
    rewards, groups, valid = columns(rows)
    expected = []
    for number, (_, reward, is_valid) in enumerate(rows):
        group = others(rows, number)
        rest = (sum(group) - reward) / (len(group) - 1) if len(group) > 1 else reward
        expected.append(reward - rest if is_valid else 0.0)

    np.testing.assert_allclose(estimators.rloo(rewards, groups, valid), expected, atol=1e-4)


TOKENS = st.lists(st.tuples(st.booleans(), st.integers(-2, 2), st.floats(-1, 1, width=16)), min_size=1, max_size=10)


@given(tokens=TOKENS, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.5, 1.0]))
def test_gae_and_returns(tokens, gamma, lam):
    """Over the sampled tokens alone; a reward on any other token belongs to the sampled one before it."""
    steps = []
    for acted, reward, value in tokens:
        if acted:
            steps.append([float(reward), value])
        elif steps:
            steps[-1][0] += reward
    advantages, returns, running, future, following = [], [], 0.0, 0.0, 0.0
    for reward, value in reversed(steps):
        running = reward + gamma * following - value + gamma * lam * running
        future, following = reward + gamma * future, value
        advantages.insert(0, running)
        returns.insert(0, future)
    mask = torch.tensor([[acted for acted, _, _ in tokens]]).long()
    rewards = torch.tensor([[float(reward) for _, reward, _ in tokens]])
    values = torch.tensor([[value for _, _, value in tokens]])

    actual, targets = estimators.gae(rewards, values * mask, mask, gamma=gamma, lam=lam)

    chosen = mask.bool()
    np.testing.assert_allclose(actual[chosen], advantages, atol=1e-4)
    np.testing.assert_allclose(estimators.discounted_returns(rewards, mask, gamma)[chosen], returns, atol=1e-4)
    np.testing.assert_allclose(targets[chosen], (actual + values)[chosen], atol=1e-6)
    assert 0 == actual[~chosen].abs().sum()


def test_reinforce_plus_plus_is_normalised_over_the_batch():
    """Mean 0 and variance 1 over the tokens of the loss, nothing elsewhere."""
    torch.manual_seed(0)
    mask = (torch.rand(4, 9) > 0.4).long()

    advantages = estimators.reinforce_plus_plus(torch.randn(4, 9) * mask, mask)

    chosen = advantages[mask.bool()]
    assert 0 == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert 1 == pytest.approx(chosen.std().item(), abs=1e-4)
    assert 0 == advantages[mask == 0].abs().sum()
