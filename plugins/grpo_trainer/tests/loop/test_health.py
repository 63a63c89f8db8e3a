"""Warnings appear when a training is lost, once each, and not otherwise."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise_grpo_trainer.loop.health import (
    EMA_DECAY,
    MAX_NATS,
    MIN_EFFECTIVE_SHARE,
    MIN_NOISE_STEPS,
    NOISE_RATIO,
    REWARD_STEPS,
    TrainingHealth,
    reward_change,
)


def run(steps, **options):
    """Observe steps; return the health and the warnings of each step."""
    health = TrainingHealth(**options)
    return health, [health.observe(number, metrics) for number, metrics in enumerate(steps, start=1)]


def noise(*, scale, batch=4.0, signal=1.0):
    """Return the metrics of a step with a noise scale."""
    return {"noise/signal": signal, "noise/trace": scale * signal, "noise/batch": batch}


@given(scale=st.floats(0.1, 1000), batch=st.floats(1, 64), steps=st.integers(1, 12))
def test_noise(scale, batch, steps):
    """The warning comes at the first step with enough measurements, if the scale is that many mini-batches."""
    measured = [noise(scale=scale, batch=batch) for _ in range(steps)]
    _, found = run(measured)

    assert measured[-1]["noise/scale"] == pytest.approx(scale)
    lost = measured[-1]["noise/scale"] > NOISE_RATIO * batch and steps >= MIN_NOISE_STEPS
    assert [MIN_NOISE_STEPS] * lost == [number for number, each in enumerate(found, start=1) if each]


def test_words():
    """The warnings name the figures and the settings."""
    _, found = run([noise(scale=80.0)] * 5)
    assert "step 5: mini-batches of 4 groups against a noise scale of 80: steps are mostly noise; raise " in found[4][0]
    _, found = run([noise(scale=80.0, signal=1.0), *([noise(scale=-50.0, signal=-1.0)] * 5)])
    assert "against a noise scale too large to be measured: steps are mostly noise" in found[-2][0]
    _, found = run([{"policy/nats": 0.55}])
    assert "step 1: the policy moved 0.55 nats a sequence in one step; lower train.optimizer.lr" in found[0][0]
    _, found = run([{"importance/ess": 0.43}])
    assert "the importance weights leave 43% of the batch" in found[0][0]
    _, found = run([{"reward/mean": 0.5, "reward/stderr": 0.1}] * REWARD_STEPS)
    assert "the reward changed by +0.000 over the last 20 steps, less than its standard error of 0.045" in found[-1][0]


@given(values=st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=15))
def test_movement_and_weights(values):
    """Each condition warns at its first step beyond the threshold, and never again."""
    _, found = run([{"policy/nats": nats, "importance/ess": share} for nats, share in values])

    moved = [number for number, (nats, _) in enumerate(values) if nats > MAX_NATS]
    thin = [number for number, (_, share) in enumerate(values) if share < MIN_EFFECTIVE_SHARE]
    expected = sorted([*moved[:1], *thin[:1]])
    assert expected == [number for number, each in enumerate(found) for _ in each]


@given(start=st.integers(0, 100), slope=st.floats(-0.02, 0.02), error=st.floats(0.001, 0.2))
def test_reward(start, slope, error):
    """The warning comes if the halves of the last steps differ by less than their standard error."""
    steps = [{"reward/mean": start + slope * number, "reward/stderr": error} for number in range(REWARD_STEPS)]
    change, uncertainty = reward_change([(each["reward/mean"], each["reward/stderr"]) for each in steps])
    _, found = run(steps)

    assert change == pytest.approx(slope * REWARD_STEPS / 2, abs=1e-9)
    assert uncertainty == pytest.approx(error * math.sqrt(2 / (REWARD_STEPS / 2)))
    assert [[]] * (REWARD_STEPS - 1) == found[:-1]
    assert (abs(change) < uncertainty) == bool(found[-1])
    assert [] == run(steps, watch_reward=False)[1][-1]


def test_gradients_of_zero_are_no_noise():
    """Without any gradient the scale is not a number, and there is no warning."""
    steps = [{"noise/signal": 0.0, "noise/trace": 0.0, "noise/batch": 4.0} for _ in range(8)]
    _, found = run(steps)

    assert math.isnan(steps[-1]["noise/scale"])
    assert [[]] * 8 == found


@given(shares=st.lists(st.floats(-3, 3), max_size=12), square=st.floats(0.5, 2))
def test_the_expected_cosine(shares, square):
    """
    Its square is the weighted mean share of signal minus the standard error of this mean; 0 without two values.

    Each share counts as at most 1.
    """
    measured = [{"noise/agreement": share * square, "noise/square": square} for share in shares]
    health, _ = run(measured)

    expected, shares = 0.0, np.clip(shares, -1, 1)
    if len(shares) > 1:
        weights = np.array([EMA_DECAY**age for age in range(len(shares))][::-1])
        weights /= weights.sum()
        mean = weights @ shares
        variance = weights @ (shares - mean) ** 2
        expected = min(1.0, max(0.0, mean - math.sqrt(variance / (1 / (weights @ weights) - 1))))
    assert health.expected_cosine**2 == pytest.approx(expected, abs=1e-6)
    if measured:
        assert health.expected_cosine == measured[-1]["noise/cosine"]


@given(seed=st.integers(0, 2**32 - 1))
def test_noise_without_a_signal_has_no_cosine(seed):
    """Shares around 0 have a mean square of the cosine far below their spread; a signal in all of them is found."""
    # The means over the steps of 1,500 seeds were at most 0.013 and at least 0.15. Single steps are not so far apart.
    noise = np.random.default_rng(seed).normal(0, 0.1, 200)
    squares = []
    health, found = TrainingHealth(), TrainingHealth()
    for share in noise:
        health.observe(1, {"noise/agreement": share, "noise/square": 1.0})
        found.observe(1, {"noise/agreement": share + 0.2, "noise/square": 1.0})
        squares.append((health.expected_cosine**2, found.expected_cosine**2))

    without, with_signal = np.mean(squares, axis=0)
    assert without < 0.05
    assert with_signal > 0.1


def test_a_tiny_gradient_moves_nothing():
    """A step of almost equal rewards has a tiny gradient; its quotient says nothing about the noise of the others."""
    noise = np.random.default_rng(0).normal(0, 0.1, 40)
    steps = [{"noise/agreement": share, "noise/square": 1.0} for share in noise]
    steps[30] = {"noise/agreement": 1e-3, "noise/square": 3e-6}
    run(steps)

    assert steps[29]["noise/cosine"] < 0.2
    assert max(step["noise/cosine"] for step in steps[30:]) < 0.3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite(value):
    """It has no effect on the averages."""
    good = {**noise(scale=8.0), "noise/agreement": 0.25, "noise/square": 1.0}
    bad = dict.fromkeys(good, value)
    health, _ = run([dict(good), bad, dict(good)])

    assert (8.0, 0.5) == (pytest.approx(health.noise_scale), pytest.approx(health.expected_cosine))


@given(cut=st.integers(0, 30), scales=st.lists(st.floats(-50, 90), min_size=31, max_size=31))
def test_a_resumed_training_warns_as_if_it_had_not_stopped(cut, scales):
    """The state, saved as JSON at any step, continues with the same noise scale and repeats no warning."""

    def steps():
        return [
            {
                **noise(scale=scale),
                "noise/agreement": scale,
                "noise/square": 90.0,
                "policy/nats": abs(scale) / 90,
                "reward/mean": 0.5,
                "reward/stderr": 0.1,
            }
            for scale in scales
        ]

    whole, expected = run(steps())
    first, found = run(steps()[:cut])
    second = TrainingHealth()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [second.observe(number, each) for number, each in enumerate(steps()[cut:], start=cut + 1)]

    assert expected == found
    assert whole.state_dict() == second.state_dict()
