"""Losses by hand, for one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise_grpo_trainer.losses import (
    clipped_surrogate,
    importance_weights,
    kl_estimate,
    log_prob_gap,
    token_weights,
    value_loss,
)

LOG_RATIO = st.floats(-3, 3)


@given(log_ratio=LOG_RATIO, advantage=st.floats(-2, 2))
def test_clip(log_ratio, advantage):
    """The worse of the free and the bounded objective, with a bound of its own on either side."""
    ratio = math.exp(log_ratio)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)

    loss, _ = clipped_surrogate(torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28)

    assert expected == pytest.approx(loss.item(), abs=1e-4)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "flows"),
    [(1.0, 1.0, False), (1.0, -1.0, True), (-1.0, 1.0, True), (-1.0, -1.0, False), (0.1, 1.0, True)],
)
def test_where_the_gradient_stops(log_ratio, advantage, flows):
    """Only a step that goes further the way it went already is cut, and the flag says where."""
    log_probs = torch.tensor([log_ratio], requires_grad=True)
    loss, clipped = clipped_surrogate(log_probs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28)
    loss.sum().backward()

    assert flows == (log_probs.grad.item() != 0)
    assert flows != clipped.item()


def test_weights():
    """Two rows of three tokens and one."""
    rows = torch.tensor([0, 0, 0, 2])

    def weights(mode):
        return token_weights(rows, mode, num_rows=2, num_tokens=4, response_length=10).tolist()

    assert [0.25] * 4 == pytest.approx(weights("token-mean"))
    assert [1 / 6] * 3 + [1 / 2] == pytest.approx(weights("seq-mean-token-mean"))
    assert [1 / 2] * 4 == pytest.approx(weights("seq-mean-token-sum"))
    assert [1 / 20] * 4 == pytest.approx(weights("seq-mean-token-sum-norm"))


def test_kl_estimates_agree_with_the_kl():
    """Over samples of the policy, k1 and k3 come to the KL itself; k3 is never negative."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    kl = (policy.exp() * (policy - reference)).sum().item()
    samples = torch.multinomial(policy.exp(), 200_000, replacement=True, generator=generator)

    for kind in ("k1", "k3"):
        values = kl_estimate(policy[samples], reference[samples], kind)
        assert kl == pytest.approx(values.mean().item(), abs=0.005)
    assert values.min() >= 0
    assert 0.02 == pytest.approx(kl_estimate(torch.tensor([0.0]), torch.tensor([0.2]), "k2").item())


def test_importance_weights_are_capped_and_carry_no_gradient():
    """The ratio of the two, up to the cap."""
    old = torch.tensor([0.0, -1.0, -3.0], requires_grad=True)
    weights = importance_weights(old, torch.tensor([0.0, -2.0, -1.0]), cap=2.0)

    assert [1.0, 2.0, math.exp(-2)] == pytest.approx(weights.tolist())
    assert not weights.requires_grad


def test_value_loss_takes_the_worse():
    """A value that ran further than the range is held to the nearer error only when that is larger."""
    errors = value_loss(torch.tensor([2.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 1.0]), 0.5)

    assert [1.5**2 / 2, 0.9**2 / 2] == pytest.approx(errors.tolist())


def test_gap_by_hand():
    """The largest difference need not be the largest for its log-probability."""
    gap = log_prob_gap(torch.tensor([-1.5, -19.0, 0.0]), torch.tensor([-1.0, -20.0, 0.0]))

    assert (gap.mean, gap.max, gap.num_tokens) == (0.5, 1.0, 3)
    assert gap.max_relative == 0.25


def test_gap_of_nothing():
    """No token, no gap."""
    assert 0.0 == log_prob_gap(torch.zeros(0), torch.zeros(0)).max
