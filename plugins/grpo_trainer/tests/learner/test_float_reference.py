"""Gradients and metrics of an update are those of a reference in float64, for any combination of options."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference_runs import load_learner, load_reference, near_policy, run_both

from turnwise.config.parts import Choice
from turnwise_grpo_trainer.config import (
    AlgorithmConfig,
)
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.rows import TokenRows

UNCHANGED = ("clip_frac", "entropy", "kl", "tis_mean", "tis_capped", "mis_masked")


ALGORITHMS = st.fixed_dictionaries(
    {
        "adv_estimator": st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gae"]),
        "gamma": st.sampled_from([1.0, 0.9]),
        "lam": st.sampled_from([1.0, 0.95, 0.0]),
        "norm_adv": st.booleans(),
        "loss_agg_mode": st.sampled_from(
            [None, "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
        ),
        "kl_loss_coef": st.sampled_from([0.0, 0.3]),
        "kl_loss_type": st.sampled_from(["k1", "k2", "k3"]),
        "entropy_coeff": st.sampled_from([0.0, 0.02]),
        "ppo_epochs": st.sampled_from([1, 2]),
        "ppo_mini_batch_size": st.sampled_from([None, 2, 3, 4]),
        "old_log_probs": st.sampled_from(["recompute", "rollout"]),
        "tis_imp_ratio_cap": st.sampled_from([None, 1.1, 2.0]),
        "tis_level": st.sampled_from(["token", "row"]),
        "mis_level": st.sampled_from(["token", "row"]),
    }
)
REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=8, max_size=8)


@pytest.mark.slow
@settings(
    max_examples=20,
    phases=(Phase.explicit, Phase.generate),  # to shrink a failure takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(options=ALGORITHMS, rewards=REWARDS, seed=st.integers(0, 99), data=st.data())
def test_updates(spec, rewarded, options, rewards, seed, data):
    """GAE, KL in loss or reward, entropy, corrections and every split in mini- and micro-batches."""
    options["use_kl_in_reward"] = options["kl_loss_coef"] > 0 and data.draw(st.booleans())
    if options["old_log_probs"] == "recompute":
        options["mis_bounds"] = data.draw(st.sampled_from([None, (0.8, 1.2)]))
    target = data.draw(st.sampled_from([None, 1e-4])) if options["ppo_mini_batch_size"] else None
    max_tokens = data.draw(st.sampled_from([16, 50, 10_000]))
    packed = data.draw(st.booleans())
    own = load_learner(
        spec,
        AlgorithmConfig(target_kl=target, **options),
        packed=packed,
        max_tokens_per_micro_batch=max_tokens,
    )
    batch = near_policy(own, rewarded(rewards), 0.2, seed)

    gradients, critic, metrics, expected = run_both(own, batch)

    # Step by step: AdamW's division by the root of tiny gradients amplifies rounding, so later steps are looser.
    for number, (found, wanted) in enumerate(zip(gradients, expected.gradients, strict=True)):
        scale = np.abs(wanted).max() + 1e-3
        np.testing.assert_allclose(found / scale, wanted / scale, atol=2e-4 if number == 0 else 5e-2)
    for found, wanted in zip(critic[:1], expected.critic_gradients[:1], strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-4 * (np.abs(wanted).max() + 1e-3))
    counted = expected.measured[: len(expected.gradients)]
    for name in UNCHANGED:
        values = [each[name] for each in counted if name in each]
        if values:
            assert metrics[f"actor/{name}"] == pytest.approx(np.concatenate(values).mean(), rel=2e-2, abs=2e-3), name
    if counted:
        assert metrics["actor/pg_loss"] == pytest.approx(np.mean(expected.losses), rel=2e-2, abs=2e-3)
    if target is not None:
        assert metrics["actor/skipped"] == pytest.approx(1 - len(expected.gradients) / expected.num_parts)


OPTIONS = {
    "the default": {},
    "ppo_clip": {"loss": "ppo_clip"},
    "dual_clip": {"loss": "dual_clip"},
    "gspo": {"loss": "gspo"},
    "cispo": {"loss": "cispo"},
    "KL in the loss": {"kl_loss_coef": 0.1},
    "KL in the reward": {"kl_loss_coef": 0.1, "use_kl_in_reward": True},
    "an entropy bonus": {"entropy_coeff": 0.01},
    "mini-batches": {"ppo_mini_batch_size": 4},
    "small mini-batches": {"ppo_mini_batch_size": 3},
    "epochs": {"ppo_epochs": 2},
    "mini-batches and a loss": {"ppo_mini_batch_size": 3, "loss": "ppo_clip"},
    "mini-batches and a bound": {"ppo_mini_batch_size": 3, "target_kl": 10.0},
    "Dr. GRPO": {"adv_estimator": "dr_grpo", "loss_agg_mode": "seq-mean-token-mean"},
    "RLOO": {"adv_estimator": "rloo"},
}
"""Options that choose no tokens."""
REWARD_CASES = {
    "one group of two varies": [1, 0, 1, 1, 1, 1, 1, 1],
    "the other one varies": [1, 1, 1, 1, 0, 0, 1, 0],
    "both vary": [1, 0, 0, 1, 0, 1, 1, 1],
    "none varies": [1] * 8,
}


@pytest.mark.many_cases(8)
@pytest.mark.parametrize("old", ["recompute", "rollout"])
@pytest.mark.parametrize("rewards", REWARD_CASES.values(), ids=REWARD_CASES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_metric_means_one_set_of_tokens(spec, rewarded, options, rewards, old):
    """
    Metrics are means over the tokens of rows with an advantage, whatever the loss and its options are.

    Without any advantage, they are those of the first row. The reference is float64.
    """
    loss = {name: Choice(value) for name, value in options.items() if name == "loss"}
    algorithm = AlgorithmConfig(old_log_probs=old, **{name: each for name, each in options.items() if name != "loss"})
    own = load_learner(spec, algorithm, lr=0.0, **loss)
    batch = near_policy(own, rewarded(rewards), 0.1, 0)
    chosen = [row for row in range(8) if len(set(rewards[row // 4 * 4 :][:4])) > 1] or [0]
    reference, rows = load_reference(own, batch), TokenRows.from_batch(batch, compute_loss_mask(batch))
    rollout = rows["rollout_log_probs"].double().numpy()
    with torch.no_grad():
        found = [[part.numpy() for part in reference.outputs(row)] for row in chosen]
    starts = [(rows.bounds[row], rows.bounds[row + 1]) for row in chosen]
    sampled = [rollout[start:stop][rows["loss_mask"][start:stop].bool().numpy()] for start, stop in starts]
    log_probs, entropy = (np.concatenate([row[at] for row in found]) for at in (0, 1))
    gap = log_probs - np.concatenate(sampled)
    first = chosen[: sum(row < (options.get("ppo_mini_batch_size") or 8) for row in chosen)]

    metrics = own.update(batch, step=1, version=0)

    assert metrics["actor/measured_tokens"] == len(log_probs) <= metrics["actor/trained_tokens"]
    assert metrics["actor/entropy"] == pytest.approx(entropy.mean(), rel=1e-5)
    weights = np.exp(gap)
    assert metrics["importance/ess"] == pytest.approx(weights.mean() ** 2 / (weights**2).mean(), rel=1e-5)
    if old == "recompute":
        assert metrics["actor/tis_mean"] == pytest.approx(np.minimum(weights, 2).mean(), rel=1e-5)
        assert metrics["actor/approx_kl"] == pytest.approx(0, abs=1e-6)
    has_pass = old == "recompute" or "ppo_mini_batch_size" not in options or "target_kl" in options
    if has_pass:
        assert metrics["gap/tokens"] == len(log_probs)
        assert metrics["gap/mean"] == pytest.approx(np.abs(gap).mean(), rel=1e-4)
    elif first:  # no forward pass over the whole batch comes before the first step
        assert metrics["gap/tokens"] == sum(len(each) for each in sampled[: len(first)])
    if old == "rollout":
        if "ppo_mini_batch_size" not in options:
            assert metrics["actor/approx_kl"] == pytest.approx((np.exp(gap) - gap - 1).mean(), rel=1e-3)
        if options.get("loss") in (None, "ppo_clip"):
            assert 0 <= metrics["actor/clip_frac"] < 1
    # The learning rate is 0: how far the policy had moved since the rollout is no movement of the update. Without a
    # pass before the update, only rows of the first mini-batch are compared.
    if has_pass or first:
        assert metrics["policy/kl"] == pytest.approx(0, abs=1e-6)
