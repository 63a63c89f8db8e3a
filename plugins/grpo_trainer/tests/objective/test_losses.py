"""The losses agree with values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise_grpo_trainer.objective.losses import (
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
    """The loss is the larger one of the unclipped and the clipped loss, with separate lower and upper bounds."""
    ratio = math.exp(log_ratio)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)

    loss, _ = clipped_surrogate(torch.tensor([log_ratio]), torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28)

    assert expected == pytest.approx(loss.item(), abs=1e-4)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "flows"),
    [(1.0, 1.0, False), (1.0, -1.0, True), (-1.0, 1.0, True), (-1.0, -1.0, False), (0.1, 1.0, True)],
)
def test_where_the_gradient_stops(log_ratio, advantage, flows):
    """The gradient stops only if the ratio is beyond the bound in the direction of the advantage; the flag says so."""
    log_probs = torch.tensor([log_ratio], requires_grad=True)
    loss, clipped = clipped_surrogate(log_probs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28)
    loss.sum().backward()

    assert flows == (log_probs.grad.item() != 0)
    assert flows != clipped.item()


def test_weights():
    """Each mode weighs the tokens of two sequences, with three tokens and one, as documented."""
    sequences = torch.tensor([0, 0, 0, 2])

    def weights(mode):
        return token_weights(sequences, mode, response_length=10).tolist()

    assert [0.25] * 4 == pytest.approx(weights("token-mean"))
    assert [1 / 6] * 3 + [1 / 2] == pytest.approx(weights("seq-mean-token-mean"))
    assert [1 / 2] * 4 == pytest.approx(weights("seq-mean-token-sum"))
    assert [1 / 20] * 4 == pytest.approx(weights("seq-mean-token-sum-norm"))


def test_kl_estimates_agree_with_the_kl():
    """On samples of the policy, the means of k1 and k3 are the KL; k3 is never negative."""
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
    """The weight is the probability ratio, at most the cap, and has no gradient."""
    old = torch.tensor([0.0, -1.0, -3.0], requires_grad=True)
    weights = importance_weights(old, torch.tensor([0.0, -2.0, -1.0]), cap=2.0)

    assert [1.0, 2.0, math.exp(-2)] == pytest.approx(weights.tolist())
    assert not weights.requires_grad


def test_value_loss_takes_the_worse():
    """The loss is the larger one of the errors of the value and of the clipped value."""
    errors = value_loss(torch.tensor([2.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 1.0]), 0.5)

    assert [1.5**2 / 2, 0.9**2 / 2] == pytest.approx(errors.tolist())


def test_gap_by_hand():
    """Mean, maximum and relative maximum of the differences; the relative one may be at another token."""
    gap = log_prob_gap(torch.tensor([-1.5, -19.0, 0.0]), torch.tensor([-1.0, -20.0, 0.0]))

    assert (gap.mean, gap.max, gap.num_tokens) == (0.5, 1.0, 3)
    assert gap.max_relative == 0.25


def test_gap_of_nothing():
    """Without tokens the gap is 0."""
    assert 0.0 == log_prob_gap(torch.zeros(0), torch.zeros(0)).max


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    mode=st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]),
)
def test_token_weights_add_up(lengths, mode):
    """The weights of all tokens add up to 1, or to the mean number of tokens of a sequence."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    whole = token_weights(rows, mode, response_length=10)

    expected = {
        "token-mean": 1.0,
        "seq-mean-token-mean": 1.0,
        "seq-mean-token-sum": len(rows) / len(lengths),
        "seq-mean-token-sum-norm": len(rows) / len(lengths) / 10,
    }[mode]
    assert whole.sum().item() == pytest.approx(expected, rel=1e-5)


@given(log_ratio=st.floats(-1000, 1000), advantage=st.floats(-2, 2))
def test_losses_are_finite_for_any_ratio(log_ratio, advantage):
    """A policy far from the rollout gives large losses and weights, but never infinite ones or NaN."""
    ratio, zero = torch.tensor([log_ratio]), torch.zeros(1)

    loss, _ = clipped_surrogate(ratio, zero, torch.tensor([advantage]), 0.2, 0.2)
    assert torch.isfinite(loss).all()
    assert 0 <= importance_weights(ratio, zero, 2.0).item() <= 2
    assert all(torch.isfinite(kl_estimate(ratio, zero, kind)).all() for kind in ("k1", "k2", "k3"))


@given(log_ratio=LOG_RATIO)
def test_k3_is_never_below_zero(log_ratio):
    """k3 is not negative, apart from rounding, and 0 for equal probabilities; k2 is half the square of k1."""
    one, zero = torch.tensor([log_ratio], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)

    assert kl_estimate(one, zero, "k3").item() >= -1e-12
    assert 0 == kl_estimate(zero, zero, "k3").item()
    assert kl_estimate(one, zero, "k2").item() == pytest.approx(log_ratio**2 / 2)


@given(low=st.floats(0.05, 0.9), high=st.floats(0.05, 3), log_ratio=LOG_RATIO)
def test_inside_the_bounds_nothing_is_clipped(low, high, log_ratio):
    """The loss is unclipped exactly where the ratio is within its bounds, for an advantage of either sign."""
    inside = 1 - low <= math.exp(log_ratio) <= 1 + high
    for advantage in (1.0, -1.0):
        loss, clipped = clipped_surrogate(
            torch.tensor([log_ratio], dtype=torch.float64),
            torch.zeros(1, dtype=torch.float64),
            torch.tensor([advantage], dtype=torch.float64),
            low,
            high,
        )
        if inside:
            assert not clipped.item()
            assert loss.item() == pytest.approx(-advantage * math.exp(log_ratio))


@given(value=st.floats(-3, 3), old=st.floats(-3, 3), target=st.floats(-3, 3))
def test_the_value_loss_never_rewards_clipping(value, old, target):
    """The clipped loss is at least the plain one, and equals it within the range."""
    loss = value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([target]), 0.5).item()
    plain = (value - target) ** 2 / 2

    assert loss >= plain - 1e-5
    if abs(value - old) <= 0.5:
        assert loss == pytest.approx(plain, abs=1e-4)
