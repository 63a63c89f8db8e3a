"""The registered losses agree with the formulas of their papers, computed token by token in float64 numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnwise_grpo_trainer.objective.loss_options import CispoConfig, ClipConfig, DualClipConfig, GspoConfig
from turnwise_grpo_trainer.objective.registered_losses import CispoLoss, ClippedLoss, DualClipLoss, GspoLoss

NUMBER = st.floats(-2, 2)
TOKEN = st.tuples(st.integers(0, 3), NUMBER, NUMBER, NUMBER)
"""A row, a log-probability, an old one, and an advantage."""


def clip(value, low, high):
    """Return a value within bounds."""
    return min(max(value, low), high)


def ppo(token, _tokens, config):
    """Return -min(r A, clip(r) A)."""
    _, new, old, advantage = token
    ratio = math.exp(new - old)
    return -min(ratio * advantage, clip(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high) * advantage)


def dual(token, tokens, config):
    """Return the loss of PPO, at most -c A where A < 0."""
    loss = ppo(token, tokens, config)
    return min(loss, -config.clip_ratio_c * token[3]) if token[3] < 0 else loss


def gspo(token, tokens, config):
    """Return PPO's loss of s, the geometric mean of the row's ratios."""
    own = [new - old for row, new, old, _ in tokens if row == token[0]]
    return ppo((token[0], sum(own) / len(own), 0.0, token[3]), tokens, config)


def cispo(token, _tokens, config):
    """Return -clip(r) A log pi."""
    _, new, old, advantage = token
    ratio = math.exp(new - old)
    return -clip(ratio, 1 - config.clip_ratio_low, 1 + config.clip_ratio_high) * advantage * new


CASES = [
    (ClippedLoss(ClipConfig(clip_ratio_high=0.28)), ppo),
    (DualClipLoss(DualClipConfig(clip_ratio_c=1.5)), dual),
    (GspoLoss(GspoConfig(clip_ratio_low=0.1, clip_ratio_high=0.2)), gspo),
    (CispoLoss(CispoConfig()), cispo),
]
ALL = pytest.mark.parametrize(("loss", "reference"), CASES, ids=["ppo_clip", "dual_clip", "gspo", "cispo"])


def compute(loss, tokens, dtype=torch.float64):
    """Return the losses of tokens, and their inputs with gradients."""
    rows, new, old, advantages = zip(*tokens, strict=True)
    log_probs = torch.tensor(new, dtype=dtype, requires_grad=True)
    losses, _ = loss.compute(
        log_probs=log_probs,
        old_log_probs=torch.tensor(old, dtype=dtype),
        rollout_log_probs=torch.tensor(old, dtype=dtype),
        advantages=torch.tensor(advantages, dtype=dtype),
        rows=torch.tensor(rows),
    )
    return losses, log_probs


@ALL
@given(tokens=st.lists(TOKEN, min_size=1, max_size=8))
def test_losses(loss, reference, tokens):
    """Each token has the loss of the paper's formula."""
    losses, _ = compute(loss, tokens)

    np.testing.assert_allclose(
        losses.detach().numpy(), [reference(token, tokens, loss.config) for token in tokens], atol=1e-12, rtol=1e-9
    )


@ALL
@given(tokens=st.lists(TOKEN, min_size=1, max_size=6), seed=st.integers(0, 100))
def test_gradients(loss, reference, tokens, seed):
    """The gradient is the difference quotient of the reference; CISPO's weight counts as a constant in it."""
    jitter = np.random.default_rng(seed).normal(0, 1e-3, len(tokens))  # away from the corners of the clip
    tokens = [(row, new + each, old, adv) for (row, new, old, adv), each in zip(tokens, jitter, strict=True)]
    losses, log_probs = compute(loss, tokens)
    losses.sum().backward()
    step = 1e-7

    def total(index, change):
        moved = [(row, new + change * (place == index), old, adv) for place, (row, new, old, adv) in enumerate(tokens)]
        if isinstance(loss, CispoLoss):
            return sum(
                reference(token, tokens, loss.config) / token[1] * new[1]
                for token, new in zip(tokens, moved, strict=True)
            )
        return sum(reference(token, moved, loss.config) for token in moved)

    numeric = [(total(index, step) - total(index, -step)) / (2 * step) for index in range(len(tokens))]
    near_corner = np.abs(np.array(numeric) - log_probs.grad.numpy()) > 1e-4 * (1 + np.abs(numeric))
    # Within `step` of a corner the quotient averages two slopes.
    assert not near_corner.any() or has_corner(loss, tokens, step)


def has_corner(loss, tokens, step):
    """Return whether a ratio is within a step of a bound."""
    config = loss.config
    bounds = [1 - config.clip_ratio_low, 1 + config.clip_ratio_high, getattr(config, "clip_ratio_c", 1.0)]
    ratios = [math.exp(new - old) for _, new, old, _ in tokens]
    if isinstance(loss, GspoLoss):
        ratios = [math.exp(np.mean([new - old for other, new, old, _ in tokens if other == row])) for row, *_ in tokens]
    return any(abs(ratio - bound) < 10 * step for ratio in ratios for bound in bounds)


def test_a_dual_clip_bounds_the_loss():
    """A token with a negative advantage that became much more likely has a constant loss, and no gradient."""
    loss = DualClipLoss(DualClipConfig())
    losses, log_probs = compute(loss, [(0, 3.0, 0.0, -1.0), (0, 0.5, 0.0, -1.0)])
    losses.sum().backward()

    assert [3.0, pytest.approx(math.exp(0.5))] == losses.tolist()
    assert [True, False] == (log_probs.grad == 0).tolist()


def test_gspo_counts_clipped_rows():
    """All tokens of a row whose ratio is clipped count as clipped."""
    loss = GspoLoss(GspoConfig())
    _, values = loss.compute(
        log_probs=torch.tensor([0.0, 0.1, 0.0, 0.0]),
        old_log_probs=torch.zeros(4),
        advantages=torch.ones(4),
        rows=torch.tensor([0, 0, 1, 1]),
    )

    assert [1.0, 1.0, 0.0, 0.0] == values["clip_frac"].tolist()
