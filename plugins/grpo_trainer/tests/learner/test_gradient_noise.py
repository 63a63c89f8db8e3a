"""The noise scale is unbiased, agrees with per-group gradients, and changes no gradient."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from turnwise_grpo_trainer.config import AlgorithmConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.gradient_noise import NoiseMeter, estimate_noise
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.mini_batches import split_batch
from turnwise_grpo_trainer.objective.rows import TokenRows

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


@given(
    gradients=arrays(np.float32, (6, 4), elements=st.floats(-4, 4, width=16)),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_shares_of_mini_batches(gradients, cuts):
    """The estimate is the mean over mini-batches, each from its shares, and the model keeps its gradients."""
    model = torch.nn.Linear(3, 1)
    meter, expected = NoiseMeter(model, lambda each: each), []
    for cut in cuts:
        for stop, size in ((cut, cut), (6, 6 - cut)):
            added = gradients[:stop].sum(0) / 6
            model.weight.grad, model.bias.grad = torch.tensor(added[None, :3]), torch.tensor(added[3:])
            meter.add_share(size, is_last=stop == 6)
            assert np.array_equal(added[:3], model.weight.grad[0].numpy())
        meter.end_mini_batch()
        parts = (gradients[:cut], gradients[cut:], gradients)
        *squares, whole = (float((each.astype(np.float64).mean(0) ** 2).sum()) for each in parts)
        expected.append(estimate_noise(squares, (cut, 6 - cut), whole))

    found = meter.estimate()

    # bfloat16 has 8 bits: with four weights alone, their roundings need not cancel.
    longest = max(float((gradients[:cut].sum(0) ** 2).sum()) for cut in (*cuts, 6))
    bound = 1e-4 + longest / 64
    assert found.signal == pytest.approx(np.mean([each.signal for each in expected]), abs=bound)
    assert found.trace == pytest.approx(np.mean([each.trace for each in expected]), abs=bound)


@pytest.mark.parametrize("sizes", [(1.0,), (1.0, 1.0), (2.0, 1.0, 1.0)])
def test_memory_of_the_copies(sizes):
    """Between the shares of a mini-batch there is half a copy of the gradient, and none after the last share."""
    model = torch.nn.Linear(512, 512)
    meter, held = NoiseMeter(model, lambda each: each), []
    for number, size in enumerate(sizes, 1):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape) if parameter.grad is None else parameter.grad + 1
        meter.add_share(size, is_last=number == len(sizes))
        held.append(sum(each.nbytes for each in meter._copies.values()))

    gradient = sum(each.nbytes for each in model.parameters())
    assert [gradient // 2] * (len(sizes) - 1) + [0] == held


@given(seed=st.integers(0, 99), angle=st.floats(0, 3.1), scale=st.floats(1e-3, 1e3))
def test_rounded_copies_measure_many_weights(seed, angle, scale):
    """With as many weights as a small layer has, lengths are those of exact copies, at any angle between two shares."""
    draw = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, 256, 256, generator=draw) * scale
    second = np.cos(angle) * first + np.sin(angle) * second
    model = torch.nn.Linear(256, 256, bias=False)
    meter = NoiseMeter(model, lambda each: each)
    model.weight.grad = first.clone()
    meter.add_share(1, is_last=False)
    model.weight.grad += second
    meter.add_share(1, is_last=True)

    squares = torch.stack(meter._squares)

    torch.testing.assert_close(squares, torch.stack([first, second]).double().square().sum((1, 2)), rtol=1e-3, atol=0)


def test_one_share_has_no_estimate():
    """A mini-batch of one group says nothing about noise; a model without gradients has none."""
    meter = NoiseMeter(torch.nn.Linear(2, 1), lambda each: each)
    meter.add_share(2, is_last=True)
    meter.end_mini_batch()
    assert meter.estimate() is None
    for _ in range(2):
        meter.add_share(2, is_last=True)
    meter.end_mini_batch()
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
    # A difference of lengths, of which one is of a rounded copy.
    assert metrics["noise/signal"] == pytest.approx(expected.signal, rel=1e-4, abs=1e-3 * expected.trace)
    assert 2 == metrics["noise/batch"]


def test_the_scale_of_several_mini_batches(spec, conversations):
    """Mini-batches are not compared with each other: one of a single group has no scale."""
    gradients, metrics = gradients_of(spec, conversations, ppo_mini_batch_size=4)

    assert 2 == len(gradients)
    assert "noise/trace" not in metrics


def test_epochs_are_averaged(spec, conversations):
    """A second pass with the same weights, here because the learning rate is 0, gives the same estimate."""
    rewards = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1])
    batch = evolve(conversations, episode_rewards=rewards)
    _, once = gradients_of(spec, batch)
    _, twice = gradients_of(spec, batch, ppo_epochs=2)

    assert twice["noise/trace"] == pytest.approx(once["noise/trace"], rel=1e-3)
    assert twice["noise/signal"] == pytest.approx(once["noise/signal"], rel=1e-3)


@frozen(eq=False)
class Batch:
    """The part of a batch that mini-batches need."""

    episode_index: torch.Tensor
    group_index: torch.Tensor

    def __len__(self):
        return len(self.episode_index)


@given(
    num_groups=st.integers(1, 5),
    group_size=st.integers(1, 4),
    size=st.one_of(st.none(), st.integers(1, 20)),
)
def test_mini_batches_have_all_rows(num_groups, group_size, size):
    """Every row is in one share of one mini-batch; shares have whole groups, and the sizes add up."""
    count = num_groups * group_size
    rows = TokenRows({"row": torch.arange(count)}, tuple(range(count + 1)))
    found = split_batch(rows, Batch(torch.arange(count), torch.arange(count) // group_size), size)

    rows = [part.rows["row"][list(share.rows)].tolist() for part in found for share in part.shares]
    assert [*range(count)] == sorted(row for share in rows for row in share)
    assert num_groups == pytest.approx(sum(part.num_groups for part in found))
    for part in found:
        groups = [{part.rows["row"][row].item() // group_size for row in share.rows} for share in part.shares]
        assert len(groups) == min(2, len(set().union(*groups)))
        assert not groups[0] & groups[-1] or len(groups) == 1
        assert len(groups[0]) - len(groups[-1]) in (0, 1)
