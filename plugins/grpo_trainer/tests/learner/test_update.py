"""A policy update does not depend on the micro-batches, and computes the sampler's log-probabilities."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from attrs import evolve
from made_batches import VOCABULARY

from turnwise_grpo_trainer.config import AlgorithmConfig, CriticConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner import learner
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.log_probs import token_log_probs
from turnwise_grpo_trainer.learner.micro_batches import collate, pack_by_tokens, shard
from turnwise_grpo_trainer.learner.models import load_policy
from turnwise_grpo_trainer.learner.update_metrics import gap_metrics
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.rows import TokenRows

ROW_MIB = 4 * VOCABULARY / (1 << 20)
POLICY = PolicyConfig(device="cpu", max_tokens_per_micro_batch=10_000)


def load_learner(spec, *, algorithm=None, **policy):
    """Return a learner with a noticeable learning rate."""
    config = TrainConfig(
        num_steps=10,
        algorithm=algorithm or AlgorithmConfig(),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.0),
        policy=evolve(POLICY, **policy),
    )
    return Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))


def compute_gradient(spec, batch, **policy):
    """Return the flattened gradient of one update, and its metrics."""
    own = load_learner(spec, **policy)
    seen = []
    own.policy.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten() for p in own.policy.model.parameters()]).clone())
    )
    metrics = own.update(batch, step=1, version=0)
    return seen[0], metrics


@pytest.mark.many_cases
@pytest.mark.parametrize("kind", ["conversations", "mixed"])
@pytest.mark.parametrize(
    "policy",
    [
        {"packed": True},
        {"max_tokens_per_micro_batch": 40},
        {"packed": True, "max_tokens_per_micro_batch": 64},
        {"gradient_checkpointing": True},
        {"logits_mib": 5 * ROW_MIB},
        {"logits_mib": 16 * ROW_MIB, "packed": True, "gradient_checkpointing": True},
        {"attn_implementation": "eager"},
        {"attn_implementation": "eager", "packed": True},
        {"attn_implementation": "turnwise_segments", "logits_mib": 8 * ROW_MIB},
    ],
    ids=str,
)
def test_gradient_is_the_same(spec, request, kind, policy):
    """The gradient is the same packed or padded, in one micro-batch or many, with any dense attention."""
    batch = request.getfixturevalue(kind)
    expected, _ = compute_gradient(spec, batch)

    actual, _ = compute_gradient(spec, batch, **policy)

    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"packed": True},
        {"max_tokens_per_micro_batch": 50},
        {"max_tokens_per_micro_batch": 120, "logits_mib": 5 * ROW_MIB},
        {"gradient_checkpointing": True},
        {"attn_implementation": "eager"},
        {"attn_implementation": "turnwise_segments"},
        {"attn_implementation": "turnwise_segments", "gradient_checkpointing": True, "logits_mib": 8 * ROW_MIB},
    ],
    ids=str,
)
def test_shared_prefixes_change_no_gradient(spec, grouped, policy):
    """With any micro-batches, the gradient is that of separate rows, and the update counts the tokens that it saves."""
    expected, before = compute_gradient(spec, grouped, share_prefixes=False, **policy)

    actual, after = compute_gradient(spec, grouped, **policy)

    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6)
    assert before["update/row_tokens"] == after["update/row_tokens"] <= before["update/forwarded_tokens"]
    assert after["update/forwarded_tokens"] < 0.9 * after["update/row_tokens"]
    for name in ("actor/pg_loss", "actor/entropy", "gap/mean", "policy/kl", "noise/trace"):
        assert after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("estimator", ["gae", "path_credit"])
def test_critics_references_and_passes_without_gradient_share_too(spec, grouped, estimator):
    """With a reference, a critic, or records without one path, metrics are those of separate rows."""
    found = []
    for share in (False, True):
        torch.manual_seed(0)  # the critic's head is drawn
        algorithm = AlgorithmConfig(adv_estimator=estimator, kl_loss_coef=0.1, ppo_mini_batch_size=8)
        found.append(load_learner(spec, algorithm=algorithm, share_prefixes=share).update(grouped, step=1, version=0))

    before, after = found
    assert before.keys() == after.keys()
    assert after["update/forwarded_tokens"] < before["update/forwarded_tokens"]
    for name, value in before.items():
        if not name.startswith(("seconds/", "cpu/", "memory/", "update/")):
            assert after[name] == pytest.approx(value, rel=5e-3, abs=1e-5), name


@pytest.mark.parametrize("rewards", [[1, 0, 1, 1, 1, 1, 1, 1], [1] * 8], ids=["one group is uniform", "all are"])
def test_rows_without_effect_are_not_computed(spec, rewarded, monkeypatch, rewards):
    """Rows of a group with equal rewards cost no forward pass, and the gradient is the same as with all rows."""
    batch = rewarded(rewards)
    actual, metrics = compute_gradient(spec, batch)
    computed = []

    def count(model, micro, *arguments, **options):
        if torch.is_grad_enabled():
            computed[-1] += len(micro.tokens)
        return token_log_probs(model, micro, *arguments, **options)

    monkeypatch.setattr(learner, "token_log_probs", count)
    computed.append(0)
    compute_gradient(spec, batch)
    computed.append(0)
    monkeypatch.setattr(learner, "needs_all_rows", lambda _config, *, has_critic: True)
    expected, all_metrics = compute_gradient(spec, batch)

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)
    assert 0 < computed[0] < computed[1] == metrics["actor/trained_tokens"]
    assert metrics["gap/tokens"] == all_metrics["gap/tokens"] == metrics["actor/measured_tokens"]
    assert metrics["actor/grad_norm"] == pytest.approx(all_metrics["actor/grad_norm"], abs=1e-6)


def log_probs_token_by_token(model, batch, row, temperature):
    """Return the log-probabilities of a row's sampled tokens, each from a forward pass over its visible tokens."""
    visible = batch.visibility()[row]
    found = {}
    for column in batch.attention_mask[row].nonzero().squeeze(1).tolist():
        response = column - batch.prompt_length
        if response < 0 or not batch.response_mask[row, response]:
            continue
        context = visible[column].clone()
        context[column] = False
        keys = context.nonzero().squeeze(1)
        bias = torch.zeros(1, 1, len(keys), len(keys)).masked_fill_(~visible[keys][:, keys], -1e9)
        logits = model(
            input_ids=batch.input_ids[row, keys][None],
            position_ids=batch.position_ids[row, keys][None],
            attention_mask=bias,
        )
        found[column] = (logits.logits[0, -1] / temperature).log_softmax(-1)[batch.input_ids[row, column]].item()
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_sampler(spec, mixed, packed, temperature):
    """Also in rows with parallel paths, only visible tokens count, at the positions of the record."""
    model = load_policy(POLICY, spec)
    rows = TokenRows.from_batch(mixed, compute_loss_mask(mixed))
    column = torch.zeros(rows.num_tokens)
    with torch.no_grad():
        for group in pack_by_tokens(rows, shard(rows, 1)[0], max_tokens=10_000, packed=packed):
            micro = collate(rows, group, packed=packed)
            column[micro.tokens] = token_log_probs(model, micro, temperature)[0]
        expected = [
            value for row in (0, 1, 3) for value in log_probs_token_by_token(model, mixed, row, temperature).values()
        ]

    actual = rows.with_columns(log_probs=column).select([0, 1, 3])
    np.testing.assert_allclose(actual["log_probs"][actual.targets], expected, atol=2e-6)


def test_mini_batches_and_epochs(spec, conversations):
    """Each mini-batch of each epoch is an optimizer step; ratios are relative to the probabilities before the first."""
    own = load_learner(spec, algorithm=AlgorithmConfig(ppo_epochs=2, ppo_mini_batch_size=4, clip_ratio_low=0.01))
    steps = []
    own.policy.optimizer.register_step_pre_hook(lambda *_: steps.append(1))

    metrics = own.update(conversations, step=1, version=0)

    assert 4 == len(steps)
    assert metrics["actor/clip_frac"] > 0


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gae"])
def test_every_estimator_moves_the_policy_towards_reward(spec, conversations, estimator):
    """Updates on one batch make its rewarded half more likely than the other half."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    scores = torch.zeros_like(conversations.rm_scores)
    last = conversations.response_mask.cumsum(1).argmax(1)
    scores[torch.arange(8), last] = torch.tensor(rewards)
    batch = evolve(conversations, rm_scores=scores, episode_rewards=torch.tensor(rewards))
    own = load_learner(spec, algorithm=AlgorithmConfig(adv_estimator=estimator, tis_imp_ratio_cap=None))
    good = torch.tensor(rewards).bool()

    def margin():
        rows = TokenRows.from_batch(batch, compute_loss_mask(batch))
        column = own._compute_column(rows, own.policy.model, own._log_probs)
        means = torch.stack([column[rows.bounds[row] : rows.bounds[row + 1]].sum() for row in range(8)])
        return (means[good].mean() - means[~good].mean()).item()

    before = margin()
    for step in range(1, 6):
        own.update(batch, step=step, version=0)

    assert margin() > before + 0.1


def test_a_reference_holds_the_policy_back(spec, conversations):
    """With a large KL coefficient, the policy stays closer to the initial model."""

    def distance(coefficient):
        own = load_learner(spec, algorithm=AlgorithmConfig(kl_loss_coef=coefficient))
        for step in range(1, 5):
            metrics = own.update(conversations, step=step, version=0)
        return metrics["actor/kl"]

    free, held = distance(1e-9), distance(10.0)

    assert held < free / 2


def test_the_gap_is_that_of_the_rollout(spec, conversations):
    """The gap is 0 for the trainer's own log-probabilities, and equals a shift that is applied to them."""
    own = load_learner(spec)
    rows = TokenRows.from_batch(conversations, compute_loss_mask(conversations))
    column = own._compute_column(rows, own.policy.model, own._log_probs)
    exact = torch.zeros(conversations.input_ids.shape)
    exact[conversations.attention_mask.bool()] = column
    exact = exact[:, conversations.prompt_length :]
    shifted = exact - 0.25 * conversations.response_mask

    assert own.update(evolve(conversations, rollout_log_probs=exact), step=1, version=0)["gap/max"] < 1e-6
    metrics = load_learner(spec).update(evolve(conversations, rollout_log_probs=shifted), step=1, version=0)

    assert 0.25 == pytest.approx(metrics["gap/mean"], abs=1e-5)
    assert 0.25 == pytest.approx(metrics["gap/max"], abs=1e-5)
    assert np.exp(0.25) - 0.25 - 1 == pytest.approx(metrics["gap/kl"], abs=1e-5)
    assert np.exp(0.25) == pytest.approx(metrics["actor/tis_mean"], abs=1e-5)


def test_nothing_compared_is_no_gap(conversations):
    """A mini-batch without a measured token reports no difference, which would be a perfect one."""
    rows = TokenRows.from_batch(conversations, compute_loss_mask(conversations))
    rows = rows.with_columns(measured=torch.zeros(len(rows["input_ids"]), dtype=torch.bool))

    assert {"gap/tokens": 0.0} == gap_metrics(rows, torch.zeros(len(rows["input_ids"])), version=0)


def test_threads_of_torch(spec):
    """`policy.num_threads` sets the threads of torch."""
    before = torch.get_num_threads()
    try:
        load_learner(spec, num_threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_the_critic_is_trained_first(spec, conversations):
    """In the critic's warm-up steps the policy keeps its weights, and the critic learns; later both learn."""
    config = TrainConfig(
        num_steps=10,
        algorithm=AlgorithmConfig(adv_estimator="gae"),
        critic=CriticConfig(lr=1e-3, warmup_steps=2),
        optimizer=OptimizerConfig(lr=1e-3),
        policy=POLICY,
    )
    own = Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))

    def changes(step):
        before = [[weight.clone() for weight in each.model.parameters()] for each in (own.policy, own.critic)]
        metrics = own.update(conversations, step=step, version=0)
        after = [list(each.model.parameters()) for each in (own.policy, own.critic)]
        moved = [not all(map(torch.equal, *pair)) for pair in zip(before, after, strict=True)]
        return (*moved, metrics["actor/grad_norm"] > 0)

    assert [(False, True, False), (False, True, False), (True, True, True)] == [changes(step) for step in (1, 2, 3)]


def test_seconds_are_measured_for_each_update(spec, conversations, monkeypatch):
    """The metrics have the seconds of one update, not the sum of all."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    own = load_learner(spec, algorithm=AlgorithmConfig(ppo_mini_batch_size=4))

    first, second = (own.update(conversations, step=step, version=0) for step in (1, 2))

    names = [name for name in first if name.startswith("seconds/")]
    stages = ("log_probs", "forward_backward", "optimizer", "diagnostics")
    assert {f"seconds/{stage}" for stage in stages} == {*names}
    assert [first[name] for name in names] == [second[name] for name in names]
