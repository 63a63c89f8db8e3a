"""Runs an update by a learner and by the reference in float64, on the same batch."""

from __future__ import annotations

import numpy as np
import torch
from attrs import evolve
from float_reference import Reference, flat_gradient

from turnwise_grpo_trainer.config import CriticConfig, DiagnosticsConfig, OptimizerConfig, PolicyConfig, TrainConfig
from turnwise_grpo_trainer.learner.learner import Learner
from turnwise_grpo_trainer.objective.advantages import compute_loss_mask
from turnwise_grpo_trainer.objective.rows import TokenRows, unpad


def load_learner(spec, algorithm, *, lr=1e-3, loss=None, **policy):
    """Return a learner whose steps are AdamW's with no clipping and no decay."""
    config = TrainConfig(
        num_steps=10,
        loss=loss,
        algorithm=algorithm,
        optimizer=OptimizerConfig(lr=lr, weight_decay=0.0, grad_clip=None),
        critic=CriticConfig(lr=lr, warmup_steps=0),
        policy=PolicyConfig(device="cpu", **policy),
        diagnostics=DiagnosticsConfig(noise_scale=False),
    )
    return Learner.load(config, spec, temperature=1.0, response_length=64, device=torch.device("cpu"))


def load_reference(own, batch):
    """Return the reference of an update by a learner that has not begun it."""
    return Reference(own, TokenRows.from_batch(batch, compute_loss_mask(batch)))


def run_both(own, batch, given=None):
    """Return the gradients of an update by the learner and its metrics, and the update of the reference."""
    rows = TokenRows.from_batch(batch, compute_loss_mask(batch))
    reference = load_reference(own, batch)
    parts = [slice(*bounds) for bounds in zip(rows.bounds, rows.bounds[1:], strict=False)]
    masks = [rows["loss_mask"][part].bool() for part in parts]
    token_rewards = []
    for part, mask in zip(parts, masks, strict=True):
        placed = unpad(batch, batch.rm_scores)[part].double().numpy()
        acted = np.flatnonzero(mask.numpy())
        moved = np.zeros(len(acted))
        for at in np.flatnonzero(placed):  # the reward of an observed token counts for the sampled one before it
            moved[np.searchsorted(acted, at, side="right") - 1] += placed[at]
        token_rewards.append(moved)
    rollout = [rows["rollout_log_probs"][part][mask].double().numpy() for part, mask in zip(parts, masks, strict=True)]
    expected = reference.run(
        batch.episode_rewards.double().numpy(), batch.group_index.numpy(), token_rewards, rollout, given
    )
    seen, critic = [], []
    own.policy.optimizer.register_step_pre_hook(lambda *_: seen.append(flat_gradient(own.policy.model)))
    if own.critic:
        own.critic.optimizer.register_step_pre_hook(lambda *_: critic.append(flat_gradient(own.critic.model)))
    return seen, critic, own.update(batch, step=1, version=0), expected


def near_policy(own, batch, noise, seed):
    """Return the batch with log-probabilities of the rollout that differ from the policy's by noise."""
    rows = TokenRows.from_batch(batch, compute_loss_mask(batch))
    column = own._compute_column(rows, own.policy.model, own._log_probs)
    drift = noise * torch.randn(column.shape, generator=torch.Generator().manual_seed(seed))
    whole = torch.zeros(batch.input_ids.shape)
    whole[batch.attention_mask.bool()] = (column + drift).clamp(max=0.0) * rows["loss_mask"]
    return evolve(batch, rollout_log_probs=whole[:, batch.prompt_length :])
