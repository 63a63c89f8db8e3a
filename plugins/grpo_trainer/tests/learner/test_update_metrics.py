"""How far an update moves the policy, when `target_kl` stops it, and the names of all metrics."""

from __future__ import annotations

from fnmatch import fnmatch

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from turnwise_grpo_trainer.config import (
    AlgorithmConfig,
    DiagnosticsConfig,
    OptimizerConfig,
    PolicyConfig,
    TrainConfig,
)
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.update_metrics import effective_share, spread_rows
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.rows import TokenRows
from turnwise_grpo_trainer.report.metric_names import TRAINING_METRICS


def make_learner(spec, *, lr=1e-3, sequences=32, noise_scale=True, **algorithm):
    """Return a learner."""
    config = TrainConfig(
        num_steps=10,
        algorithm=AlgorithmConfig(**algorithm),
        optimizer=OptimizerConfig(lr=lr, weight_decay=0.0),
        policy=PolicyConfig(device="cpu"),
        diagnostics=DiagnosticsConfig(noise_scale=noise_scale, sequences=sequences),
    )
    return Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))


def log_probs(own, batch):
    """Return the rows of a batch, and the policy's log-probabilities."""
    rows = TokenRows.from_batch(batch, compute_loss_mask(batch))
    return rows, own._compute_column(rows, own.policy.model, own._log_probs)


@pytest.mark.parametrize("mini_batch", [None, 4])
def test_movement_of_an_update(spec, conversations, mini_batch):
    """`policy/nats` is the summed k3 estimate of a row, between the policies before and after all steps."""
    own = make_learner(spec, ppo_mini_batch_size=mini_batch)
    batch = evolve(conversations, episode_rewards=torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1]))
    rows, before = log_probs(own, batch)

    metrics = own.update(batch, step=1, version=0)

    log_ratio = (log_probs(own, batch)[1] - before)[rows.targets].double()
    each = log_ratio.exp() - 1 - log_ratio
    assert metrics["policy/nats"] == pytest.approx(float(each.sum()) / len(batch), rel=1e-3)
    assert metrics["policy/kl"] == pytest.approx(float(each.mean()), rel=1e-3)
    assert metrics["policy/nats"] > 1e-4


def test_a_learning_rate_of_zero_moves_nothing(spec, conversations):
    """Neither KL is above rounding."""
    metrics = make_learner(spec, lr=0.0, ppo_mini_batch_size=2).update(conversations, step=1, version=0)

    assert abs(metrics["policy/nats"]) < 1e-6
    assert abs(metrics["actor/approx_kl"]) < 1e-6


@pytest.mark.parametrize(("target", "steps", "skipped"), [(1e-7, 1, 7 / 8), (1e6, 8, 0.0)])
def test_target_kl_skips_the_rest(spec, conversations, target, steps, skipped):
    """The first step is always made; the mini-batch that sees too large a KL and all later ones are skipped."""
    own, made = make_learner(spec, ppo_mini_batch_size=2, ppo_epochs=2, target_kl=target), []
    own.policy.optimizer.register_step_pre_hook(lambda *_: made.append(1))

    metrics = own.update(conversations, step=1, version=0)

    assert (steps, skipped) == (len(made), pytest.approx(metrics["actor/skipped"]))
    assert (metrics["actor/approx_kl"] > target) == (skipped > 0)
    assert all(parameter.grad is None for parameter in own.policy.model.parameters())


def test_a_stopped_update_equals_a_shorter_one(spec, conversations):
    """The weights are those after the steps that were made."""
    stopped = make_learner(spec, ppo_mini_batch_size=4, target_kl=1e-7)
    shorter = make_learner(spec, ppo_mini_batch_size=4)
    steps = iter([shorter.policy.optimizer.step, lambda: None])
    shorter.policy.optimizer.step = lambda: next(steps)()

    stopped.update(conversations, step=1, version=0)
    shorter.update(conversations, step=1, version=0)

    for one, other in zip(stopped.policy.model.parameters(), shorter.policy.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mini_batch", [None, 4])
@pytest.mark.parametrize("target", [None, 1e-6])
@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_earlier_movement_is_no_movement_of_the_update(spec, rewarded, old, target, mini_batch):
    """Movement of the policy since the rollout skips no mini-batch, and is not in the diagnostics."""
    stale = rewarded([1, 0, 0, 1, 0, 1, 1, 0])  # sampled from random log-probabilities, far from the policy's
    own = make_learner(spec, lr=0.0, old_log_probs=old, target_kl=target, ppo_mini_batch_size=mini_batch)

    still = own.update(stale, step=1, version=2)

    assert 0.0 == still.get("actor/skipped", 0.0)
    assert still["gap/kl"] > 0.1
    assert max(abs(still["policy/kl"]), abs(still["policy/nats"])) < 1e-6
    if target is not None or old == "recompute":
        assert abs(still["actor/approx_kl"]) < 1e-6


def test_diagnostics_can_be_disabled(spec, conversations):
    """Neither the noise scale nor the movement is measured, and no forward pass is made for them."""
    metrics = make_learner(spec, sequences=0, noise_scale=False).update(conversations, step=1, version=0)

    assert not {name for name in metrics if name.startswith(("noise/", "policy/")) or name == "seconds/diagnostics"}


def test_diagnostics_do_not_change_the_training(spec, conversations):
    """The weights are the same with and without them, up to the order of a sum."""
    one, other = make_learner(spec), make_learner(spec, sequences=0, noise_scale=False)
    for step in (1, 2):
        one.update(conversations, step=step, version=0)
        other.update(conversations, step=step, version=0)

    for first, second in zip(one.policy.model.parameters(), other.policy.model.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=2e-5)


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=20))
def test_effective_share(weights):
    """It is 1 for equal weights, and at least the share of a single token."""
    array = np.array(weights)
    share = effective_share(array.mean(), (array**2).mean())

    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9
    assert share == pytest.approx(array.sum() ** 2 / (len(array) * (array**2).sum()))
    assert effective_share(2.0, 4.0) == 1


def test_the_weights_of_a_foreign_rollout(spec, conversations):
    """Tokens whose rollout had other probabilities count for less."""
    own = make_learner(spec)
    exact = log_probs(own, conversations)[1]
    whole = torch.zeros(conversations.input_ids.shape)
    whole[conversations.attention_mask.bool()] = exact
    whole = whole[:, conversations.prompt_length :]
    noise = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0)) * conversations.response_mask

    same = make_learner(spec).update(evolve(conversations, rollout_log_probs=whole), step=1, version=0)
    other = make_learner(spec).update(evolve(conversations, rollout_log_probs=whole - noise), step=1, version=0)

    assert same["importance/ess"] == pytest.approx(1, abs=1e-5)
    assert other["importance/ess"] < 0.8


@given(limit=st.integers(0, 12))
def test_rows_are_spread(limit):
    """At most so many rows are chosen, in order and evenly, and only rows with a token in the loss."""
    lengths = [3] * 10
    bounds = tuple(int(each) for each in np.cumsum([0, *lengths]))
    mask = torch.tensor([float(number // 3 not in (2, 5)) for number in range(30)])
    rows = TokenRows({"loss_mask": mask, "row": torch.arange(30) // 3}, bounds)

    chosen = spread_rows(rows, limit)["row"].unique().tolist()

    assert min(limit, 8) == len(chosen)
    assert not {2, 5} & {*chosen}
    assert chosen[:1] == [0][:limit]


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_every_metric_is_documented(spec, conversations, estimator):
    """The reference lists each name that an update logs."""
    own = make_learner(spec, adv_estimator=estimator, kl_loss_coef=0.1, target_kl=1.0, ppo_mini_batch_size=4)

    metrics = own.update(conversations, step=1, version=0)

    assert [] == [name for name in metrics if not any(fnmatch(name, known) for known in TRAINING_METRICS)]
