"""The estimators agree with plain Python versions of the papers' formulas."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from made_batches import advantages_of

from turnwise import Status
from turnwise_grpo_trainer.config import AlgorithmConfig
from turnwise_grpo_trainer.objective import advantages as estimators
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask, valid_rows

REWARDS = st.lists(st.tuples(st.integers(0, 3), st.floats(-4, 4, width=16), st.booleans()), min_size=1, max_size=12)


def columns(rows):
    """Return rewards, groups (numbered from 0) and valid flags as tensors."""
    numbers = {}
    groups = [numbers.setdefault(group, len(numbers)) for group, _, _ in rows]
    return (
        torch.tensor([reward for _, reward, _ in rows]),
        torch.tensor(groups),
        torch.tensor([valid for _, _, valid in rows]),
    )


def group_rewards(rows, number):
    """Return the rewards of all valid rows in the group of a row."""
    return [reward for group, reward, valid in rows if valid and group == rows[number][0]]


@given(rows=REWARDS)
def test_grpo(rows):
    """GRPO is the reward minus the group's mean, divided by its deviation; Dr. GRPO does not divide."""
    rewards, groups, valid = columns(rows)
    expected, plain = [], []
    for number, (_, reward, is_valid) in enumerate(rows):
        group = group_rewards(rows, number)
        centred = reward - statistics.fmean(group) if is_valid and len(group) > 1 else 0.0
        deviation = statistics.stdev(group) if len(group) > 1 else 0.0
        plain.append(centred)
        expected.append(centred / (deviation + estimators.EPSILON))

    np.testing.assert_allclose(estimators.grpo(rewards, groups, valid, norm_adv_by_std=False), plain, atol=1e-5)
    actual = estimators.grpo(rewards, groups, valid)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@given(reward=st.floats(-1e4, 1e4, width=32), size=st.integers(1, 40))
def test_equal_rewards_have_no_advantage(reward, size):
    """Advantages of equal rewards are exactly 0: rounding of the mean is not amplified by a tiny deviation."""
    rewards, groups = torch.full((size,), reward), torch.zeros(size, dtype=torch.long)
    mask = torch.ones(size, 1)

    assert not estimators.grpo(rewards, groups, mask[:, 0].bool()).any()
    assert not estimators.whiten(rewards[:, None], mask).any()


@given(rows=REWARDS)
def test_rloo(rows):
    """RLOO is the reward minus the mean reward of the other rows in the group."""
    rewards, groups, valid = columns(rows)
    expected = []
    for number, (_, reward, is_valid) in enumerate(rows):
        group = group_rewards(rows, number)
        rest = (sum(group) - reward) / (len(group) - 1) if len(group) > 1 else reward
        expected.append(reward - rest if is_valid else 0.0)

    np.testing.assert_allclose(estimators.rloo(rewards, groups, valid), expected, atol=1e-4)


TOKENS = st.lists(st.tuples(st.booleans(), st.integers(-2, 2), st.floats(-1, 1, width=16)), min_size=1, max_size=10)


@given(tokens=TOKENS, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([0.0, 0.5, 1.0]))
def test_gae_and_returns(tokens, gamma, lam):
    """Only sampled tokens are time steps; a reward on another token belongs to the sampled token before it."""
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
    """REINFORCE++ advantages have mean 0 and variance 1 over the tokens in the loss, and are 0 elsewhere."""
    torch.manual_seed(0)
    mask = (torch.rand(4, 9) > 0.4).long()

    advantages = estimators.reinforce_plus_plus(torch.randn(4, 9) * mask, mask)

    chosen = advantages[mask.bool()]
    assert 0 == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert 1 == pytest.approx(chosen.std().item(), abs=1e-4)
    assert 0 == advantages[mask == 0].abs().sum()


@given(rows=REWARDS, shift=st.integers(-8, 8), scale=st.sampled_from([0.5, 2.0, 8.0]))
def test_group_baselines_ignore_a_shift_and_scale_with_the_rewards(rows, shift, scale):
    """A constant added to all rewards changes nothing; a factor scales Dr. GRPO and RLOO."""
    rewards, groups, valid = columns(rows)
    for estimator in (
        lambda values: estimators.grpo(values, groups, valid, norm_adv_by_std=False),
        lambda values: estimators.rloo(values, groups, valid),
    ):
        torch.testing.assert_close(estimator(rewards + shift), estimator(rewards), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(estimator(rewards * scale), estimator(rewards) * scale, atol=1e-4, rtol=1e-4)


@given(rows=REWARDS)
def test_advantages_of_a_group_add_up_to_zero(rows):
    """In every group the baseline is the mean, so advantages cancel; rows without a reward have none."""
    rewards, groups, valid = columns(rows)
    for advantages in (
        estimators.grpo(rewards, groups, valid),
        estimators.grpo(rewards, groups, valid, norm_adv_by_std=False),
        estimators.rloo(rewards, groups, valid),
    ):
        sums = torch.zeros(int(groups.max()) + 1).index_add(0, groups, advantages)
        assert sums.abs().max() < 1e-4
        assert not advantages[~valid].any()


@given(tokens=TOKENS)
def test_rewards_are_moved_to_sampled_tokens(tokens):
    """Moving keeps the sum of all rewards after the first sampled token, and leaves none on other tokens."""
    mask = torch.tensor([[acted for acted, _, _ in tokens]]).long()
    rewards = torch.tensor([[float(reward) for _, reward, _ in tokens]])

    moved = estimators.move_to_actions(rewards, mask)

    first = next((place for place, (acted, _, _) in enumerate(tokens) if acted), len(tokens))
    assert moved.sum() == rewards[:, first:].sum()
    assert not moved[mask == 0].any()


@given(tokens=TOKENS)
def test_gae_with_lambda_one_is_the_return_minus_the_value(tokens):
    """At lambda 1 and gamma 1 the critic's values are only a baseline."""
    mask = torch.tensor([[acted for acted, _, _ in tokens]]).long()
    rewards = torch.tensor([[float(reward) for _, reward, _ in tokens]])
    values = torch.tensor([[value for _, _, value in tokens]]) * mask

    advantages, targets = estimators.gae(rewards, values, mask, gamma=1.0, lam=1.0)

    returns = estimators.discounted_returns(rewards, mask)
    torch.testing.assert_close(advantages, (returns - values) * mask, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(targets, returns, atol=1e-4, rtol=1e-4)


def with_statuses(batch, **statuses):
    """Return the batch with other statuses of some rows, by index."""
    rows = [
        evolve(row, status=statuses.get(f"row{index}", row.status)) if hasattr(row, "status") else row
        for index, row in enumerate(batch.rows)
    ]
    return evolve(batch, rows=tuple(rows))


def test_failed_and_unscored_rows_have_no_loss(rewarded):
    """Rows of failed episodes and rows without a score have no token in the loss; truncated ones only if asked."""
    batch = rewarded([1, 0, 1, 0])
    scored = batch.scored.clone()
    scored[1] = False
    batch = with_statuses(evolve(batch, scored=scored), row0=Status.FAILED, row2=Status.TRUNCATED)

    assert [False, False, True, True] == valid_rows(batch).tolist()
    assert [False, False, True, True] == compute_loss_mask(batch).any(1).tolist()
    assert [False, False, False, True] == compute_loss_mask(batch, mask_truncated=True).any(1).tolist()
    assert torch.equal(compute_loss_mask(batch)[3], batch.loss_mask[3])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_outcome_estimators_give_every_token_the_row_advantage(rewarded, estimator):
    """Each sampled token of an episode has the same advantage, by the estimator of that name; other tokens have 0."""
    batch = rewarded([1, 0, 0, 1, 1, 1, 1, 0])
    mask = compute_loss_mask(batch)

    advantages = advantages_of(batch, AlgorithmConfig(adv_estimator=estimator), mask=mask)

    totals, valid = batch.rm_scores.sum(1), torch.ones(8, dtype=torch.bool)
    expected = {
        "grpo": lambda: estimators.grpo(totals, batch.group_index, valid),
        "dr_grpo": lambda: estimators.grpo(totals, batch.group_index, valid, norm_adv_by_std=False),
        "rloo": lambda: estimators.rloo(totals, batch.group_index, valid),
    }[estimator]()
    torch.testing.assert_close(advantages.values, expected[:, None] * mask)
    assert advantages.returns is None


def test_the_kl_is_subtracted_from_the_rewards(rewarded):
    """With `use_kl_in_reward`, each token's reward is reduced by the coefficient times its log-ratio."""
    batch = rewarded([1, 0, 0, 1])
    mask = compute_loss_mask(batch)
    config = AlgorithmConfig(adv_estimator="dr_grpo", kl_loss_coef=0.5)
    kl = torch.rand(mask.shape)

    with_kl = advantages_of(batch, config, mask=mask, kl=kl)

    reduced = evolve(batch, episode_rewards=batch.episode_rewards - (0.5 * kl * mask).sum(1))
    torch.testing.assert_close(with_kl.values, advantages_of(reduced, config, mask=mask).values)


def test_gae_needs_a_critic(rewarded):
    """Without the critic's values, gae is refused; `norm_adv` decides whether its advantages are normalised."""
    batch = rewarded([1, 0])
    mask = compute_loss_mask(batch)
    with pytest.raises(ValueError, match="the estimator gae needs the critic's values"):
        advantages_of(batch, AlgorithmConfig(adv_estimator="gae"), mask=mask)

    values = torch.rand(mask.shape) * mask
    plain, normed = (
        advantages_of(batch, AlgorithmConfig(adv_estimator="gae", norm_adv=norm), mask=mask, values=values)
        for norm in (False, True)
    )
    torch.testing.assert_close(normed.values, estimators.whiten(plain.values, mask))
    torch.testing.assert_close(plain.returns, normed.returns)
