"""Credit by path: records without a path, the exact gradient, and the update with `path_credit`."""

from __future__ import annotations

import copy
from itertools import product

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from made_batches import make_batch
from transformers import Qwen3Config, Qwen3ForCausalLM

from turnwise import Trajectory
from turnwise.config.parts import Choice
from turnwise.errors import ConfigError
from turnwise.layout import Objective
from turnwise_grpo_trainer.config import AlgorithmConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.learner.log_probs import token_log_probs
from turnwise_grpo_trainer.learner.micro_batches import collate
from turnwise_grpo_trainer.objective.loss_options import PathCreditConfig
from turnwise_grpo_trainer.objective.path_credit import PathCredit
from turnwise_grpo_trainer.objective.path_ratios import leave_out, measure_paths, runs_of
from turnwise_grpo_trainer.objective.rows import TokenRows

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


@frozen
class Token:
    """A token of an episode; tokens outside of blocks have the block -1."""

    id: int
    is_sampled: bool
    block: int = -1
    path: int = -1


TOKENS = st.lists(st.integers(1, 39), min_size=1, max_size=3)
BLOCKS = st.lists(st.tuples(st.lists(TOKENS, min_size=1, max_size=3), TOKENS), min_size=0, max_size=3)
"""Blocks of paths, and the tokens that are sampled after each."""


def tokens_of(episode):
    """Return the tokens of an episode: a prompt, a sampled token, and blocks, each with forced tags."""
    first, blocks = episode
    found = [Token(1, is_sampled=False), Token(first, is_sampled=True)]
    for block, (paths, after) in enumerate(blocks):
        for path, sampled in enumerate(paths):
            found.append(Token(2, is_sampled=False, block=block, path=path))
            found += [Token(each, is_sampled=True, block=block, path=path) for each in sampled]
        found.append(Token(3, is_sampled=False))
        found += [Token(each, is_sampled=True) for each in after]
    return found


def record_of(episode):
    """Return the record that an agent makes of an episode."""
    first, blocks = episode
    record = Trajectory([1])
    record.add_action([first], np.zeros(1, np.float32))
    for paths, after in blocks:
        branches = record.fork(len(paths))
        for branch, sampled in zip(branches, paths, strict=True):
            branch.add_forced([2])
            branch.add_action(sampled, np.zeros(len(sampled), np.float32))
        record.join(branches)
        record.add_forced([3])
        record.add_action(after, np.zeros(len(after), np.float32))
    return record


def probabilities_of(model, tokens):
    """
    Return the log-probability of each token in float64.

    A token sees all earlier ones but those of other paths of its block. Paths of a block have the same positions, and
    the token after them follows the longest one.
    """
    positions, base, offset, longest, inside = [], 0, 0, 0, (-1, -1)
    for token in tokens:
        if token.block != inside[0]:  # enters a block, or leaves one
            base, longest = base + longest, 0
        if (token.block, token.path) != inside:
            offset, inside = 0, (token.block, token.path)
        positions.append(base + offset)
        offset += 1
        longest = max(longest, offset)
    seen = [
        [at <= now and (a.block != b.block or a.block == -1 or a.path == b.path) for at, b in enumerate(tokens)]
        for now, a in enumerate(tokens)
    ]
    mask = torch.where(torch.tensor(seen), 0.0, -torch.inf).double()[None, None]
    ids = torch.tensor([[each.id for each in tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=torch.tensor([positions])).logits[0]
    log_probs = logits.double().log_softmax(-1).numpy()
    # The token before is the last one that a token sees, which is not always the one beside it.
    before = [max((at for at in range(now) if seen[now][at]), default=0) for now in range(len(tokens))]
    return np.array([log_probs[before[now], token.id] for now, token in enumerate(tokens)])


def expected_advantages(model, episodes, rewards, cap):
    """Return the advantages of the sampled tokens of each episode of one group, by the formula of the module."""
    centred = np.array(rewards) - np.mean(rewards)
    scale = np.std(rewards, ddof=1) + 1e-6
    found = []
    for episode, advantage in zip(episodes, centred / scale, strict=True):
        tokens = tokens_of(episode)
        whole = probabilities_of(model, tokens)
        shares = {}
        for block, path in sorted({(each.block, each.path) for each in tokens if each.block >= 0}):
            kept = [at for at, each in enumerate(tokens) if (each.block, each.path) != (block, path)]
            without = probabilities_of(model, [tokens[at] for at in kept])
            last = max(at for at, each in enumerate(tokens) if each.block == block)
            change = sum(
                without[number] - whole[at] for number, at in enumerate(kept) if at > last and tokens[at].is_sampled
            )
            shares[block, path] = 1 - min(np.exp(change), cap)
        found.append([advantage * shares.get((each.block, each.path), 1.0) for each in tokens if each.is_sampled])
    return found


@settings(
    max_examples=25,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    episodes=st.lists(st.tuples(st.integers(1, 39), BLOCKS), min_size=2, max_size=4),
    data=st.data(),
    cap=st.sampled_from([1.0, 3.0, 100.0]),
    old=st.sampled_from(["recompute", "rollout"]),
    max_tokens=st.sampled_from([24, 10_000]),
    packed=st.booleans(),
)
def test_advantages_are_those_of_a_reference(spec, episodes, data, cap, old, max_tokens, packed):
    """For any blocks, paths and splits in micro-batches; the reference is float64, a row and a path at a time."""
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(episodes), max_size=len(episodes)))
    batch = make_batch([record_of(each) for each in episodes], rewards, group_size=len(episodes))
    algorithm = AlgorithmConfig(adv_estimator=Choice("path_credit", {"ratio_cap": cap}), old_log_probs=old)
    policy = PolicyConfig(device="cpu", packed=packed, max_tokens_per_micro_batch=max_tokens)
    learner = Learner.load(
        TrainConfig(algorithm=algorithm, policy=policy),
        spec,
        temperature=1.0,
        response_length=64,
        device=torch.device("cpu"),
    )
    reference = copy.deepcopy(learner.policy.model).double()
    reference.set_attn_implementation("eager")

    learner.update(batch, step=1, version=0)

    expected = expected_advantages(reference, episodes, rewards, cap)
    for row, wanted in enumerate(expected):
        found = learner.advantages[row][batch.loss_mask[row].bool()]
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-3, atol=1e-3)
