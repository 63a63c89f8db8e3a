"""Tokens whose log-probability is -inf, in the rollout or in the model: finite losses and metrics, and no lost step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attrs import evolve
from reference_runs import load_learner, near_policy

from turnwise.config.parts import Choice
from turnwise_grpo_trainer.config import AlgorithmConfig
from turnwise_grpo_trainer.objective.losses import kl_estimate, log_prob_gap

OPTIONS = {
    "the default": {},
    "old ones of the rollout": {"old_log_probs": "rollout"},
    "a weight of rows": {"tis_level": "row"},
    "a mask of tokens": {"mis_bounds": (0.5, 2.0), "mis_level": "token"},
    "a mask of rows": {"mis_bounds": (0.5, 2.0)},
    "mini-batches": {"ppo_mini_batch_size": 4},
    "KL in the loss": {"kl_loss_coef": 0.1},
    "KL in the reward": {"kl_loss_coef": 0.1, "use_kl_in_reward": True},
    "dual_clip": {"loss": "dual_clip", "old_log_probs": "rollout"},
    "gspo": {"loss": "gspo", "old_log_probs": "rollout"},
    "cispo": {"loss": "cispo", "old_log_probs": "rollout"},
}


@pytest.mark.many_cases(5)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_engine_that_reports_minus_infinity(spec, rewarded, options):
    """Gradient, weights and metrics stay finite; -inf differs from a log-probability of -1,000 nowhere in the loss."""
    loss = {name: Choice(value) for name, value in options.items() if name == "loss"}
    algorithm = AlgorithmConfig(**{name: value for name, value in options.items() if name != "loss"})
    batch = near_policy(load_learner(spec, algorithm), rewarded([1, 0, 0, 1, 0, 1, 1, 0]), 0.1, 0)
    found = []
    for value in (-math.inf, -1000.0):
        own = load_learner(spec, algorithm, **loss)
        rollout = batch.rollout_log_probs.clone()
        rows, columns = batch.loss_mask.nonzero(as_tuple=True)
        rollout[rows[::7], columns[::7]] = value
        metrics = own.update(evolve(batch, rollout_log_probs=rollout), step=1, version=0)
        assert all(torch.isfinite(each).all() for each in own.policy.model.parameters())
        found.append(metrics)

    for name, value in found[0].items():
        if name.startswith(("actor/", "importance/")):
            assert math.isfinite(value), name
            assert value == pytest.approx(found[1][name], rel=1e-5, abs=1e-6), name
        assert not math.isnan(value), name


def test_estimates_of_impossible_tokens():
    """An infinite difference is a large one; two impossible tokens are equal."""
    one, other = torch.tensor([-math.inf, -1.0, -math.inf]), torch.tensor([-1.0, -math.inf, -math.inf])
    for kind in ("k1", "k2", "k3"):
        assert not torch.isnan(kl_estimate(one, other, kind)).any(), kind
    gap = log_prob_gap(one, other)
    assert not np.isnan([gap.mean, gap.max, gap.max_relative, gap.kl]).any()
