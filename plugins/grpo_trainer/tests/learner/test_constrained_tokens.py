"""Turns that were sampled under a grammar: the update sees them as context, whatever their log-probabilities are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from made_batches import ids, logprobs, make_batch
from reference_runs import load_learner, run_both

from turnwise import Trajectory
from turnwise_grpo_trainer.config import AlgorithmConfig

REWARDS = [1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0, 0.25]


def batch_of(kind, *, shift=0.0):
    """Return eight records of a turn, another one under a grammar, and a third; `kind` says what the second one is."""
    rng = np.random.default_rng(5)
    records = []
    for _ in REWARDS:
        record = Trajectory(ids(rng, 4))
        for turn in range(3):
            tokens, values = ids(rng, 3), logprobs(rng, 3)
            if turn != 1:
                record.add_action(tokens, values)
            elif kind == "observation":
                record.add_observation(tokens)
            else:
                record.add_action(tokens, values - shift, constrained=kind == "constrained")
            record.add_observation(ids(rng, 2))
        records.append(record)
    return make_batch(records, REWARDS)


def update(spec, batch, **options):
    """Return the gradients and metrics of an update, and the same of the reference in float64."""
    own = load_learner(spec, AlgorithmConfig(**options))
    gradients, _critic, metrics, expected = run_both(own, batch)
    return gradients, metrics, expected


@pytest.mark.many_cases(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"old_log_probs": "rollout"}, {"ppo_mini_batch_size": 4}, {"kl_loss_coef": 0.1}],
    ids=["the default", "log-probabilities of the rollout", "mini-batches", "a KL loss"],
)
def test_the_gradient_sums_over_free_tokens_alone(spec, options):
    """It is that of the reference, and bit by bit the one of records with observations in their place."""
    gradients, metrics, expected = update(spec, batch_of("constrained"), **options)
    as_observed, observed_metrics, _ = update(spec, batch_of("observation"), **options)
    as_sampled, _, _ = update(spec, batch_of("action"), **options)

    wanted = expected.gradients[0]
    scale = np.abs(wanted).max() + 1e-3
    np.testing.assert_allclose(gradients[0] / scale, wanted / scale, atol=2e-4)
    assert all(np.array_equal(one, other) for one, other in zip(gradients, as_observed, strict=True))
    assert metrics["actor/trained_tokens"] == observed_metrics["actor/trained_tokens"] == 8 * 6
    assert not np.allclose(gradients[0], as_sampled[0], atol=1e-3 * scale)


@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_log_probs_of_constrained_tokens_change_nothing(spec, old):
    """Importance weights, corrections and metrics of the gap leave them out."""
    found = [update(spec, batch_of("constrained", shift=shift), old_log_probs=old) for shift in (0.0, 7.0)]

    (gradients, metrics, _), (others, other_metrics, _) = found
    assert all(np.array_equal(one, other) for one, other in zip(gradients, others, strict=True))
    same = [name for name in metrics if name.startswith(("actor/", "gap/", "importance/"))]
    assert same
    assert [metrics[name] for name in same] == [other_metrics[name] for name in same]


def test_the_expected_gradient_is_exact_for_the_free_tokens():
    """
    On a toy that can be enumerated: the expectation of the sum over the tokens with mask 1, times the reward, is the
    gradient of the expected reward in which the constrained distribution is fixed.
    """
    size, allowed = 4, [0, 2]
    theta = torch.randn(size + 1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theta.requires_grad_()
    reward = torch.randn(size, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    free = theta.log_softmax(-1)
    masked = theta.masked_fill(~torch.isin(torch.arange(size), torch.tensor(allowed)), -torch.inf).log_softmax(-1)
    # A free token, a constrained one behind it, and a free one behind that: each depends on the token before.
    expected_reward, estimate = torch.zeros((), dtype=torch.float64), torch.zeros_like(theta)
    for first, second, third in itertools.product(range(size), allowed, range(size)):
        steps = [free[size, first], masked[first, second], free[second, third]]
        record = Trajectory([0])
        for number, (token, step) in enumerate(zip((first, second, third), steps, strict=True)):
            record.add_action([token], [step.item()], constrained=number == 1)
        value = reward[first, second, third]
        expected_reward = expected_reward + (steps[0] + steps[1].detach() + steps[2]).exp() * value
        logprob = sum(step for step, trained in zip(steps, record.response_mask, strict=True) if trained)
        (gradient,) = torch.autograd.grad(logprob, theta, retain_graph=True)
        estimate += sum(steps).exp().detach() * value * gradient

    (wanted,) = torch.autograd.grad(expected_reward, theta)

    torch.testing.assert_close(estimate, wanted, rtol=0, atol=1e-12)
