"""The noise scale is unbiased, agrees with per-group gradients, and changes no gradient."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from turnwise_grpo_trainer.config import AlgorithmConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.gradient_noise import NoiseMeter, estimate_noise
from turnwise_grpo_trainer.learner import Learner

POPULATION = arrays(np.float64, (3, 2), elements=st.integers(-9, 9))


@given(population=POPULATION, sizes=st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 2), (1, 1, 2)]))
def test_estimates_are_unbiased(population, sizes):
    """Over all samples of groups from a population, the mean estimates are its exact values, also for uneven parts."""
    signals, traces = [], []
    for drawn in itertools.product(population, repeat=sum(sizes)):
        groups = np.array(drawn)
        parts = [part.mean(0) for part in np.split(groups, np.cumsum(sizes)[:-1])]
        found = estimate_noise([float(part @ part) for part in parts], sizes, float((groups.mean(0) ** 2).sum()))
        signals.append(found.signal)
        traces.append(found.trace)

    mean = population.mean(0)
    assert np.mean(signals) == pytest.approx(float(mean @ mean), abs=1e-9)
    assert np.mean(traces) == pytest.approx(float(population.var(0).sum()), abs=1e-9)


@given(gradients=arrays(np.float32, (6, 4), elements=st.floats(-4, 4, width=16)), cut=st.integers(1, 5))
def test_mini_batches_and_shares_agree(gradients, cut):
    """Parts give the same estimate as mini-batches and as shares of one, and the model keeps its gradients."""
    model = torch.nn.Linear(3, 1)
    parts, sizes = [gradients[:cut], gradients[cut:]], [cut, 6 - cut]

    def write(vector):
        model.weight.grad = torch.tensor(vector[None, :3])
        model.bias.grad = torch.tensor(vector[3:])

    by_batch, by_share = NoiseMeter(model, lambda each: each), NoiseMeter(model, lambda each: each)
    for part, size in zip(parts, sizes, strict=True):
        write(part.mean(0))
        by_batch.add(size)
    for size in (cut, 6):
        write(gradients[:size].sum(0) / 6)
        before = model.weight.grad.clone()
        by_share.add_share(size if size == cut else 6 - cut)
        assert torch.equal(before, model.weight.grad)
    exact = gradients.astype(np.float64)
    expected = estimate_noise(
        [float((part.astype(np.float64).mean(0) ** 2).sum()) for part in parts],
        sizes,
        float((exact.mean(0) ** 2).sum()),
    )

    for meter in (by_batch, by_share):
        found = meter.estimate()
        assert found.signal == pytest.approx(expected.signal, abs=1e-4)
        assert found.trace == pytest.approx(expected.trace, abs=1e-4)


def test_one_part_has_no_estimate():
    """A single mini-batch of one group, or a model without gradients, says nothing about noise."""
    meter = NoiseMeter(torch.nn.Linear(2, 1), lambda each: each)
    assert meter.estimate() is None
    meter.add(2)
    assert meter.estimate() is None
    meter.add(2)
    assert (0.0, 0.0) == (meter.estimate().signal, meter.estimate().trace)


def load_learner(spec, **algorithm):
    """Return a learner whose steps change nothing, so that all mini-batches see the same policy."""
    config = TrainConfig(
        num_steps=10,
        algorithm=AlgorithmConfig(**algorithm),
        optimizer=OptimizerConfig(lr=0.0, weight_decay=0.0),
        policy=PolicyConfig(device="cpu", max_tokens_per_micro_batch=100),
    )
    return Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))


def gradients_of(spec, batch, **algorithm):
    """Return the gradient of each optimizer step of an update, and the metrics."""
    own, seen = load_learner(spec, **algorithm), []
    own.policy.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([each.grad.flatten() for each in own.policy.model.parameters()]).double())
    )
    return seen, own.update(batch, step=1, version=0)


def test_the_scale_of_an_update_is_that_of_its_groups(spec, conversations):
    """With one mini-batch, each half has one group: the estimate is the one from the gradients of single groups."""
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1])
    single = []
    for group in range(2):
        # In a group with equal rewards all advantages are 0, so the gradient is the other group's share.
        uniform = torch.where(conversations.group_index == group, rewards, 1.0)
        (gradient,), _ = gradients_of(spec, evolve(conversations, episode_rewards=uniform))
        single.append(2 * gradient)

    (whole,), metrics = gradients_of(spec, evolve(conversations, episode_rewards=rewards))

    torch.testing.assert_close(whole, (single[0] + single[1]) / 2, rtol=0, atol=1e-6)
    expected = estimate_noise([float(each @ each) for each in single], [1, 1], float(whole @ whole))
    assert metrics["noise/trace"] == pytest.approx(expected.trace, rel=1e-4)
    assert metrics["noise/signal"] == pytest.approx(expected.signal, rel=1e-4)
    assert 2 == metrics["noise/batch"]


def test_the_scale_of_several_mini_batches(spec, conversations):
    """With several, their own gradients are compared, once for all epochs."""
    gradients, metrics = gradients_of(spec, conversations, ppo_mini_batch_size=4, ppo_epochs=2)

    assert 4 == len(gradients)
    whole = (gradients[0] + gradients[1]) / 2
    expected = estimate_noise([float(each @ each) for each in gradients[:2]], [1, 1], float(whole @ whole))
    assert metrics["noise/trace"] == pytest.approx(expected.trace, rel=1e-4)
    assert metrics["noise/signal"] == pytest.approx(expected.signal, rel=1e-4, abs=1e-6)
    assert 1 == metrics["noise/batch"]
