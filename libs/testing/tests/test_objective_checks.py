"""The checks of losses and advantages find what breaks a training, and accept what does not."""

from __future__ import annotations

import pytest
import torch

from turnwise_testing.checks.check import run_check
from turnwise_testing.checks.objective import ADVANTAGE_CHECKS, LOSS_CHECKS, AdvantageProbe, LossProbe


class Reinforce:
    """A right loss: minus the advantage times the log-probability."""

    def compute(self, *, log_probs, advantages, **more):
        return -advantages * log_probs, {}


class Exploding(Reinforce):
    def compute(self, *, log_probs, old_log_probs, advantages, **more):
        return -advantages * (10 * (log_probs - old_log_probs)).exp(), {}


class WrongSign(Reinforce):
    def compute(self, *, log_probs, advantages, **more):
        return advantages * log_probs, {}


class PlaceDependent(Reinforce):
    def compute(self, *, log_probs, advantages, **more):
        return -advantages * log_probs * torch.arange(1, 1 + len(log_probs)), {}


class BatchDependent(Reinforce):
    def compute(self, *, log_probs, advantages, **more):
        return -(advantages - advantages.mean()) * log_probs, {}


class Changing(Reinforce):
    def compute(self, *, log_probs, advantages, **more):
        return -advantages.mul_(2) * log_probs, {}


class Summed(Reinforce):
    def compute(self, *, log_probs, advantages, **more):
        return (-advantages * log_probs).sum(), {}


@pytest.mark.parametrize("check", list(LOSS_CHECKS.values()), ids=list(LOSS_CHECKS))
def test_a_right_loss_passes(check):
    """REINFORCE keeps every promise."""
    assert run_check(check, LossProbe(make_loss=Reinforce)) is None


@pytest.mark.parametrize(
    ("loss", "check", "message"),
    [
        (Exploding, "gradient_is_finite", "a loss is not finite"),
        (WrongSign, "follows_the_advantages", "a step against the gradient"),
        (PlaceDependent, "order_of_rows_changes_nothing", "depends on the order"),
        (BatchDependent, "micro_batches_change_nothing", "depends on the other rows"),
        (Changing, "inputs_are_constants", "the input 'advantages' was changed"),
        (Summed, "gradient_is_finite", r"10 tokens have losses of the shape \(\)"),
    ],
)
def test_a_wrong_loss_fails(loss, check, message):
    """Each kind of mistake fails its check, with a text about it."""
    with pytest.raises(AssertionError, match=message):
        run_check(LOSS_CHECKS[check], LossProbe(make_loss=loss))


class MinusHalf:
    """A right estimator: the reward minus a constant."""

    def estimate(self, *, rewards, valid, **more):
        return (rewards - 0.5) * valid


class Divided(MinusHalf):
    def estimate(self, *, rewards, **more):
        return (rewards - rewards.mean()) / rewards.std()


class Shifted(MinusHalf):
    def estimate(self, *, rewards, **more):
        return rewards - rewards[0]


class Careless(MinusHalf):
    def estimate(self, *, rewards, **more):
        return rewards - rewards.mean()


class RowWise(MinusHalf):
    def estimate(self, *, token_rewards, mask, episodes, **more):
        return (token_rewards.sum(1) - token_rewards.sum(1).sum() / len(episodes))[:, None] * mask


@pytest.mark.parametrize("check", list(ADVANTAGE_CHECKS.values()), ids=list(ADVANTAGE_CHECKS))
def test_a_right_estimator_passes(check):
    """A constant baseline keeps every promise."""
    assert run_check(check, AdvantageProbe(make_estimator=MinusHalf)) is None


@pytest.mark.parametrize(
    ("estimator", "check", "message"),
    [
        (Divided, "advantages_are_finite", "an advantage is not finite: equal rewards"),
        (Shifted, "order_of_episodes_changes_nothing", "depend on the order"),
        (Careless, "rewards_of_unscored_episodes_change_nothing", "changes advantages"),
        (RowWise, "expanding_an_episode_changes_nothing", "depend on the number of an episode's rows"),
    ],
)
def test_a_wrong_estimator_fails(estimator, check, message):
    """Each kind of mistake fails its check, with a text about it."""
    with pytest.raises(AssertionError, match=message):
        run_check(ADVANTAGE_CHECKS[check], AdvantageProbe(make_estimator=estimator))
