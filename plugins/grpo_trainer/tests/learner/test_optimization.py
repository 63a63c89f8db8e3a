"""Optimizer, schedule and gradient clipping of a trained model."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from turnwise_grpo_trainer.config import OptimizerConfig
from turnwise_grpo_trainer.learner.optimization import TrainableModel, lr_factor

SCHEDULES = st.builds(
    OptimizerConfig,
    lr_schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup_steps=st.integers(0, 5),
    min_lr_ratio=st.floats(0, 1),
)


def make_model(num_steps=4, **options):
    """Return a trainable linear layer of two weights, both 1."""
    layer = nn.Linear(2, 1, bias=False)
    nn.init.ones_(layer.weight)
    config = OptimizerConfig(**{"lr": 0.1, "weight_decay": 0.0, **options})
    return TrainableModel.create(layer, config, lr=config.lr, num_steps=num_steps)


def set_gradient(trainable, *values):
    """Set the gradient of the layer."""
    trainable.model.weight.grad = torch.tensor([values], dtype=torch.float32)


@given(config=SCHEDULES, num_steps=st.integers(1, 12))
def test_the_schedule_rises_and_then_falls(config, num_steps):
    """The rate rises linearly in the warm-up, never rises afterwards, and stays between its minimum and 1."""
    factors = [lr_factor(config, step, num_steps) for step in range(num_steps + 3)]
    warmup, rest = factors[: config.warmup_steps], factors[config.warmup_steps :]

    assert warmup == pytest.approx([(step + 1) / config.warmup_steps for step in range(len(warmup))])
    assert rest == sorted(rest, reverse=True)
    assert all(config.min_lr_ratio - 1e-9 <= factor <= 1 + 1e-9 for factor in rest)
    if config.lr_schedule != "constant" and num_steps > config.warmup_steps:
        assert factors[num_steps] == pytest.approx(config.min_lr_ratio)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.5, 0.25]), ("cosine", [1, 0.853553, 0.5, 0.146447])],
)
def test_schedules_by_hand(schedule, expected):
    """Four steps of each schedule without warm-up, down to 0 at the step after the last."""
    config = OptimizerConfig(lr_schedule=schedule)

    assert expected == pytest.approx([lr_factor(config, step, 4) for step in range(4)], abs=1e-6)


@given(factor=st.floats(0, 2), config=SCHEDULES)
def test_a_factor_holds_for_one_step(factor, config):
    """A factor multiplies the rate of the schedule, until the schedule moves on."""
    layer = nn.Linear(2, 1)
    trainable = TrainableModel.create(layer, config, lr=0.1, num_steps=4)
    trainable.scale_lr(factor)

    assert 0.1 * lr_factor(config, 0, 4) * factor == pytest.approx(trainable.lr)
    trainable.advance()
    assert 0.1 * lr_factor(config, 1, 4) == pytest.approx(trainable.lr)


@given(gradients=st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=5))
def test_a_gradient_is_compared_with_those_before_it(gradients):
    """The mean before it weighs a gradient of n steps ago by beta^n; it is not biased towards 0."""
    trainable = make_model(betas=(0.8, 0.99), grad_clip=None, lr=1e-9)
    for number, gradient in enumerate(gradients):
        set_gradient(trainable, *gradient)
        weights = torch.tensor([0.8 ** (number - before) for before in range(number)])
        mean = weights @ torch.tensor(gradients[:number]).reshape(-1, 2) / weights.sum()
        now = torch.tensor(gradient)
        product = trainable.multiply_with_momentum()

        assert (product is None) == (number == 0)
        if product is not None:
            torch.testing.assert_close(product.float(), now @ mean, atol=1e-5, rtol=1e-4)
        trainable.step()


def test_the_gradient_is_clipped():
    """`step` returns the norm before clipping; AdamW then gets a gradient with the norm `grad_clip`."""
    trainable = make_model(grad_clip=1.0)
    set_gradient(trainable, 3.0, 4.0)
    seen = []
    trainable.optimizer.register_step_pre_hook(lambda *_: seen.append(trainable.model.weight.grad.clone()))

    assert 5.0 == pytest.approx(trainable.step())
    torch.testing.assert_close(seen[0], torch.tensor([[0.6, 0.8]]), atol=1e-5, rtol=0)
    assert trainable.model.weight.grad is None


def test_no_clipping():
    """With `grad_clip: null` the gradient is unchanged, and its norm is returned."""
    trainable = make_model(grad_clip=None)
    set_gradient(trainable, 30.0, 40.0)

    assert 50.0 == pytest.approx(trainable.step())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(value):
    """The weights and the optimizer states stay, the gradient is cleared, and the norm shows the problem."""
    trainable = make_model()
    set_gradient(trainable, value, 1.0)

    assert not math.isfinite(trainable.step())
    assert [[1.0, 1.0]] == trainable.model.weight.tolist()
    assert trainable.model.weight.grad is None
    assert not trainable.optimizer.state


@given(step=st.integers(0, 6))
def test_seeking_a_step(step):
    """After `seek` and `advance`, the rates equal the rates of torch's own schedule, to the bit."""
    walked, sought = (make_model(num_steps=5, lr_schedule="linear", warmup_steps=2) for _ in range(2))
    for _ in range(step):
        walked.optimizer.step()
        walked.schedule.step()

    sought.seek(step)

    for _ in range(3):
        assert walked.lr == sought.lr
        sought.advance()
        walked.optimizer.step()
        walked.schedule.step()


def test_tied_weights_are_sent_once():
    """A weight with two names comes under its first one, as in a Hugging Face checkpoint."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(3, 2)
            self.head = nn.Linear(2, 3, bias=False)
            self.head.weight = self.embedding.weight

    trainable = TrainableModel.create(Tied(), OptimizerConfig(), lr=0.1, num_steps=1)

    assert ["embedding.weight"] == [name for name, _ in trainable.full_weights()]
