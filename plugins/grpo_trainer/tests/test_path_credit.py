"""Credit by path: records without a path, the exact gradient, and the update with `path_credit`."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from attrs import evolve
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise import Trajectory
from turnwise.config.parts import Choice
from turnwise.errors import ConfigError
from turnwise.layout import Objective
from turnwise_grpo_trainer.config import AlgorithmConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner import Learner
from turnwise_grpo_trainer.log_probs import token_log_probs
from turnwise_grpo_trainer.loss_options import PathCreditConfig
from turnwise_grpo_trainer.micro_batches import collate
from turnwise_grpo_trainer.path_credit import PathCredit
from turnwise_grpo_trainer.path_ratios import leave_out, measure_paths, runs_of
from turnwise_grpo_trainer.rows import TokenRows

from .conftest import make_batch

LENGTHS = ((1, 2), (1, 1))
"""Sampled tokens of the paths of two blocks."""
NUM_SAMPLED = 7


def make_record(sampled, left_out=None):
    """Return a record with two blocks of two paths, all of whose tokens are 0 or 1, without one of the paths."""
    tokens = iter(sampled)
    record = Trajectory([1, 0, 1])
    for block, lengths in enumerate(LENGTHS):
        parts = [[next(tokens) for _ in range(length)] for length in lengths]
        kept = [part for path, part in enumerate(parts) if left_out != (block, path)]
        paths = record.fork(len(kept))
        for path, part in zip(paths, kept, strict=True):
            path.add_forced([1])
            path.add_action(part, np.zeros(len(part), np.float32))
        record.join(paths)
        record.add_forced([0])
        record.add_action([next(tokens)], np.zeros(1, np.float32))
    return record


def rows_of(batch):
    """Return the trainer's view of a batch."""
    return TokenRows.from_batch(batch, batch.loss_mask)


@pytest.fixture(scope="module")
def model():
    """A model of two tokens, under which every token depends strongly on those before."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8}
    config = Qwen3Config(vocab_size=2, num_attention_heads=2, num_key_value_heads=2, **shape)
    policy = Qwen3ForCausalLM(config).double()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim == 2:
                parameter.mul_(12)
    return policy


def log_probs_of(model, rows):
    """Return (N,) the log-probabilities of the tokens in the loss, with their gradient."""
    micro = collate(rows, range(len(rows)), packed=False)
    return torch.zeros(rows.num_tokens).index_put((micro.tokens,), token_log_probs(model, micro, 1.0)[0])


@pytest.mark.parametrize("left_out", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_record_without_a_path(left_out):
    """The row without a path is the row of a record that never had it; only tokens after its block are in the loss."""
    sampled = [1, 0, 1, 1, 0, 1, 0]
    whole, expected = (rows_of(make_batch([make_record(sampled, without)])) for without in (None, left_out))
    found = leave_out(whole, 0, runs_of(whole, 0)[2 * left_out[0] + left_out[1]])

    for name in ("input_ids", "position_ids", "block_start", "path_start"):
        assert torch.equal(expected[name], found[name]), name
    after = 4 if left_out[0] == 0 else 1  # the summary, two paths and the end; or the end
    assert expected.targets[-after:].tolist() == found.targets.tolist()


def gradient_of(model, value):
    """Return the gradient in one vector."""
    return torch.cat([each.flatten() for each in torch.autograd.grad(value, list(model.parameters()))])


def test_the_expected_gradient_is_exact(model):
    """Over all episodes that the policy can sample, the estimate's mean is the gradient of the expected reward."""
    episodes = list(product([0, 1], repeat=NUM_SAMPLED))
    # The reward reads the summary and the last token, and not the paths.
    rewards = torch.tensor([[1.0, 0.3], [0.0, 0.8]])[tuple(torch.tensor(episodes).T[[3, 6]])]
    batch = make_batch([make_record(each) for each in episodes], rewards.tolist(), group_size=len(episodes))
    rows = rows_of(batch)
    log_probs = log_probs_of(model, rows)
    probabilities = torch.zeros(len(batch)).index_add(0, rows.row_index, log_probs).exp()
    assert probabilities.sum().item() == pytest.approx(1, abs=1e-5)
    expected = gradient_of(model, (probabilities * rewards).sum())

    rows = rows.with_columns(old_log_probs=log_probs.detach())
    credit = PathCredit(PathCreditConfig(norm_adv_by_std=False, ratio_cap=float("inf")))

    def estimate(change=lambda ratios: ratios):
        def measure(chosen):
            with torch.no_grad():
                return change(measure_paths(batch, rows, chosen, lambda reduced: log_probs_of(model, reduced)))

        one = torch.ones(len(batch), dtype=torch.bool)
        found = credit.estimate(
            rewards=rewards,
            groups=torch.zeros(len(batch), dtype=torch.int64),
            valid=one,
            mask=batch.loss_mask,
            episodes=batch.episode_index,
            leave_out=measure,
        )
        columns = torch.zeros(batch.input_ids.shape)
        columns[:, batch.prompt_length :] = found * batch.loss_mask
        advantages = columns[batch.attention_mask.bool()]
        sampled = log_probs_of(model, rows) * advantages * probabilities.detach()[rows.row_index]
        return gradient_of(model, sampled.sum()), found[batch.loss_mask.bool()]

    found, advantages = estimate()
    size = expected.norm()
    assert (found - expected).norm() < 1e-5 * size
    # The advantages of paths are smaller than the episode's, and the ratios of other paths give another gradient.
    assert advantages.square().mean() < 0.5 * (rewards - rewards.mean()).square().mean()
    wrong, _ = estimate(lambda ratios: evolve(ratios, log_ratios=ratios.log_ratios.roll(1)))
    assert (wrong - expected).norm() > 0.01 * size


def update(spec, batch, config):
    """Return the metrics and the advantages of an update on a batch."""
    train = TrainConfig(algorithm=config, policy=PolicyConfig(device="cpu"))
    learner = Learner.load(train, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))
    metrics = learner.update(batch, step=1, version=0)
    return metrics, learner.advantages


def test_the_update_gives_each_path_its_advantage(spec, mixed):
    """Paths of an episode have different advantages within the bound; all other tokens have the advantage of `grpo`."""
    options = {"old_log_probs": "recompute", "ppo_mini_batch_size": 4}
    _, plain = update(spec, mixed, AlgorithmConfig(**options))
    credit = Choice("path_credit", {"ratio_cap": 3.0})
    metrics, found = update(spec, mixed, AlgorithmConfig(adv_estimator=credit, **options))

    in_path = (mixed.path_start[:, mixed.prompt_length :] > 0) & mixed.loss_mask.bool()
    assert torch.equal(plain[~in_path], found[~in_path])
    shares = (found / plain)[in_path & (plain != 0)]
    assert -2 - 1e-5 <= shares.min() < shares.max() <= 1
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    "options",
    [{}, {"ppo_epochs": 2}, {"old_log_probs": "rollout"}, {"old_log_probs": "rollout", "ppo_mini_batch_size": 4}],
    ids=str,
)
def test_a_stale_batch_has_the_credit_of_a_fresh_one(spec, mixed, options):
    """The ratios compare one policy with itself, however far it has moved since the rollout."""
    config = AlgorithmConfig(adv_estimator=Choice("path_credit", {"ratio_cap": 3.0}))
    _, fresh = update(spec, mixed, evolve(config, ppo_mini_batch_size=len(mixed)))
    drift = 0.3 * torch.randn(mixed.rollout_log_probs.shape, generator=torch.Generator().manual_seed(0))
    stale = evolve(mixed, rollout_log_probs=mixed.rollout_log_probs + drift * mixed.loss_mask)

    _, found = update(spec, stale, evolve(config, **options))

    torch.testing.assert_close(found, fresh, rtol=0, atol=1e-5)


def test_expanded_rows_are_refused(spec, mixed):
    """A batch of an engine without layouts has no paths to leave out, and the error says so."""
    expanded = evolve(mixed, rows=[evolve(row, objective=Objective.EXPANDED) for row in mixed.rows])
    with pytest.raises(ConfigError, match="path_credit needs an engine with layouts"):
        update(spec, expanded, AlgorithmConfig(adv_estimator=Choice("path_credit")))
