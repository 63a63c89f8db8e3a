"""
An update of the policy computed a second time: float64, one row at a time, losses and their derivatives by hand.

torch computes the logits and their derivatives alone. Everything between the rewards and the derivative of the loss by
each token's log-probability, entropy and value is numpy, written from the papers' formulas and the documentation.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from attrs import define, field

from turnwise_grpo_trainer.learner.micro_batches import collate

EPSILON = 1e-6
CLAMP = 20.0


@define
class Update:
    """The optimizer steps of a reference: gradients, and for each step the measured tokens' values."""

    gradients: list[np.ndarray] = field(factory=list)
    critic_gradients: list[np.ndarray] = field(factory=list)
    measured: list[dict[str, np.ndarray]] = field(factory=list)
    losses: list[float] = field(factory=list)
    num_parts: int = 0
    stopped: bool = False


def limited(values):
    return np.clip(values, -CLAMP, CLAMP)


def advantages(config, rewards, groups, token_rewards, values=None, kl=None):
    """
    Return the advantages of each row's sampled tokens, and the targets of the critic.

    Args:
        config: the section `algorithm`.
        rewards: of each row, which is a whole episode.
        groups: of each row.
        token_rewards: of each row, on its sampled tokens.
        values: of each row, on its sampled tokens.
        kl: of each row, on its sampled tokens.
    """
    name = config.adv_estimator.name
    coefficient = config.kl_loss_coef if kl is not None else 0.0
    kl = kl or [np.zeros(len(each)) for each in token_rewards]
    if name in ("grpo", "dr_grpo", "rloo"):
        totals = np.array([reward - coefficient * each.sum() for reward, each in zip(rewards, kl, strict=True)])
        found = []
        for row, total in enumerate(totals):
            group = totals[groups == groups[row]]
            others = len(group) - 1
            if not others:
                found.append(0.0)
            elif name == "rloo":
                found.append(total - (group.sum() - total) / others)
            else:
                centred = total - group.mean()
                found.append(centred / (group.std(ddof=1) + EPSILON) if name == "grpo" else centred)
        return [np.full(len(each), value) for each, value in zip(token_rewards, found, strict=True)], None
    shaped = [reward - coefficient * each for reward, each in zip(token_rewards, kl, strict=True)]
    if name == "reinforce_plus_plus":
        returns = []
        for each in shaped:
            steps = np.arange(len(each))
            returns.append(np.array([(config.gamma ** (steps[at:] - at) * each[at:]).sum() for at in range(len(each))]))
        return whiten(returns), None
    found = []
    for each, value in zip(shaped, values, strict=True):
        after = np.append(value[1:], 0.0)
        errors = each + config.gamma * after - value
        steps = np.arange(len(each))
        decay = config.gamma * config.lam
        found.append(np.array([(decay ** (steps[at:] - at) * errors[at:]).sum() for at in range(len(each))]))
    targets = [each + value for each, value in zip(found, values, strict=True)]
    return whiten(found) if config.norm_adv else found, targets


def whiten(rows):
    whole = np.concatenate(rows)
    scale = whole.std(ddof=1) if len(whole) > 1 else 0.0
    return [(each - whole.mean()) / (scale + EPSILON) for each in rows]


def weights(mode, lengths, response_length):
    """Return each token's weight in the loss of a mini-batch; a row is an episode."""
    if mode == "token-mean":
        return [np.full(length, 1 / sum(lengths)) for length in lengths]
    each = {"seq-mean-token-mean": lambda n: 1 / n, "seq-mean-token-sum": lambda _n: 1.0}.get(
        mode, lambda _n: 1 / response_length
    )
    return [np.full(length, each(length) / len(lengths)) for length in lengths]


def policy_terms(config, log_probs, old, rollout, ref, entropy, adv):
    """Return the derivatives of a row's losses by log-probability and by entropy, measured values, and the losses."""
    against = rollout if config.old_log_probs == "rollout" else old
    raw = log_probs - against
    ratio = np.exp(limited(raw))
    inside = np.abs(raw) < CLAMP
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    plain, clipped = -adv * ratio, -adv * np.clip(ratio, low, high)
    is_clipped = clipped > plain
    loss = np.where(is_clipped, clipped, plain)
    slope = np.where(is_clipped, 0.0, plain * inside)
    weight = np.ones_like(loss)
    measured = {"clip_frac": is_clipped.astype(float), "entropy": entropy}
    if config.old_log_probs == "recompute":
        gap = old - rollout
        if config.tis_imp_ratio_cap is not None:
            total = gap if config.tis_level == "token" else np.full_like(gap, gap.sum())
            weight = np.minimum(np.exp(limited(total)), config.tis_imp_ratio_cap)
            measured["tis_mean"] = weight
            measured["tis_capped"] = (weight >= config.tis_imp_ratio_cap).astype(float)
        if config.mis_bounds is not None:
            ratios = np.exp(limited(gap if config.mis_level == "token" else np.full_like(gap, gap.mean())))
            kept = (config.mis_bounds[0] <= ratios) & (ratios <= config.mis_bounds[1])
            weight = weight * kept
            measured["mis_masked"] = 1.0 - kept
    loss, slope = loss * weight, slope * weight
    before = against if config.target_kl is None else old
    back = limited(-(before - log_probs))
    measured["approx_kl"] = np.exp(back) - back - 1
    measured["importance"] = np.exp(limited(log_probs - rollout))
    if ref is not None:
        difference = log_probs - ref
        clamped = limited(-difference)
        kl, kl_slope = {
            "k1": (difference, np.ones_like(difference)),
            "k2": (difference**2 / 2, difference),
            "k3": (np.exp(clamped) - clamped - 1, (1 - np.exp(clamped)) * (np.abs(difference) < CLAMP)),
        }[config.kl_loss_type]
        measured["kl"] = kl
        if not config.use_kl_in_reward:
            slope = slope + config.kl_loss_coef * kl_slope
    return slope, np.full_like(loss, -config.entropy_coeff), measured, loss


class Reference:
    """
    The same update as that of a learner, from a copy of its models; make it before the learner updates.

    Args:
        learner: its models are copied.
        rows: the batch, as `TokenRows`, whose rows are whole episodes.
        temperature: of the sampling.
    """

    def __init__(self, learner, rows, temperature=1.0):
        self.config, self.response_length = learner.config, learner.response_length
        self.policy = copy.deepcopy(learner.policy.model).double()
        self.critic = copy.deepcopy(learner.critic.model).double() if learner.critic else None
        self.rows, self.temperature = rows, temperature

    def outputs(self, row, model=None):
        """Return the log-probabilities and entropies of a row's sampled tokens, with gradients."""
        micro = collate(self.rows, [row], packed=False)
        logits = (model or self.policy)(
            input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=self.bias(micro)
        ).logits[0]
        at = micro.keep[micro.predictors[1]]
        each = (logits[at].double() / self.temperature).log_softmax(-1)
        return each[torch.arange(len(at)), micro.labels], -(each.exp() * each).sum(-1)

    def values(self, row):
        micro = collate(self.rows, [row], packed=False)
        found = self.critic(
            input_ids=micro.input_ids, position_ids=micro.position_ids, attention_mask=self.bias(micro)
        ).logits[0, :, 0]
        return found[micro.keep[micro.predictors[1]]]

    def bias(self, micro):
        """Return an additive mask of which tokens a token sees."""
        length = micro.input_ids.shape[1]
        seen = torch.ones(length, length).tril().bool() if not micro.has_blocks else micro.attention_mask()[0, 0]
        return torch.zeros(1, 1, length, length, dtype=torch.float64).masked_fill(~seen, torch.finfo().min)

    def train_critic(self, row, share, before, target):
        """Add the gradient of the critic's loss on a row: the worse of the plain and the clipped error, halved."""
        value = self.values(row)
        now, limit = value.detach().numpy(), self.config.critic.cliprange_value
        near = before + np.clip(now - before, -limit, limit)
        is_worse = (near - target) ** 2 > (now - target) ** 2
        slope = np.where(is_worse, (near - target) * (np.abs(now - before) < limit), now - target)
        torch.autograd.backward((torch.from_numpy(share * slope) * value).sum())

    def run(self, rewards, groups, token_rewards, rollout, given=None):
        """
        Return the `Update` of one training step.

        Args:
            rewards: (B,) of the rows.
            groups: (B,) of the rows.
            token_rewards: of each row, on its sampled tokens.
            rollout: of each row, log-probabilities of its sampled tokens.
            given: advantages of each row, instead of those of a named estimator.
        """
        config, settings = self.config.algorithm, self.config.optimizer
        num_rows = len(self.rows)
        with torch.no_grad():
            old = [self.outputs(row)[0].numpy() for row in range(num_rows)]
            values = [self.values(row).numpy() for row in range(num_rows)] if self.critic else None
        ref = old if config.kl_loss_coef else None  # the reference is the initial model, as the policy is here
        kl = [a - b for a, b in zip(old, ref, strict=True)] if ref and config.use_kl_in_reward else None
        adv, targets = (given, None) if given else advantages(config, rewards, groups, token_rewards, values, kl)
        effective = [row for row in range(num_rows) if np.abs(adv[row]).max() > 0] or [0]
        size = config.ppo_mini_batch_size or num_rows
        parts = [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
        chosen = [(self.policy, settings.lr)] + ([(self.critic, self.config.critic.lr)] if self.critic else [])
        optimizers = [
            torch.optim.AdamW(model.parameters(), lr=lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0)
            for model, lr in chosen
        ]
        update = Update(num_parts=len(parts) * config.ppo_epochs)
        for part in [*parts] * config.ppo_epochs:
            shares = weights(config.agg_mode, [len(old[row]) for row in part], self.response_length)
            measured: list[dict[str, np.ndarray]] = []
            loss_sum = 0.0
            for row, share in zip(part, shares, strict=True):
                log_probs, entropy = self.outputs(row)
                slope, entropy_slope, found, pg_loss = policy_terms(
                    config,
                    log_probs.detach().numpy(),
                    old[row],
                    rollout[row],
                    ref[row] if ref else None,
                    entropy.detach().numpy(),
                    adv[row],
                )
                loss_sum += float((share * pg_loss).sum())
                if row in effective:
                    measured.append(found)
                losses = torch.from_numpy(share * slope) * log_probs + torch.from_numpy(share * entropy_slope) * entropy
                torch.autograd.backward(losses.sum())
                if self.critic:
                    self.train_critic(row, share, values[row], targets[row])
            joined = {
                name: np.concatenate([each[name] for each in measured]) for name in (measured[0] if measured else ())
            }
            update.measured.append(joined)
            moved = joined["approx_kl"].mean() if measured else 0.0
            if config.target_kl is not None and moved > config.target_kl:
                update.stopped = True
                break
            update.losses.append(loss_sum)
            update.gradients.append(flat_gradient(self.policy))
            if self.critic:
                update.critic_gradients.append(flat_gradient(self.critic))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return update


def flat_gradient(model):
    return np.concatenate([each.grad.flatten().double().numpy() for each in model.parameters() if each.requires_grad])
