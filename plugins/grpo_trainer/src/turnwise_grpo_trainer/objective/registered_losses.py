"""
Losses that the trainer registers besides its own clipped one: GSPO, CISPO and PPO with a dual clip.

r_t is the probability ratio of token t between the policy and the policy before the update, A_t its advantage.
"""

# ruff: noqa: TID253 - factories import this module; no hook does

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from turnwise_grpo_trainer.config import AlgorithmConfig
from turnwise_grpo_trainer.objective.loss_options import ClipConfig, DualClipConfig
from turnwise_grpo_trainer.objective.losses import clipped_surrogate, limit_log_ratio, row_means

Output = tuple[Tensor, Mapping[str, Tensor]]


@frozen
class ClippedLoss:
    """The trainer's own loss: PPO's clipped surrogate with separate bounds; see `losses.clipped_surrogate`."""

    config: ClipConfig | AlgorithmConfig

    def compute(self, *, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, **_more: object) -> Output:
        low, high = self.config.clip_ratio_low, self.config.clip_ratio_high
        losses, clipped = clipped_surrogate(log_probs, old_log_probs, advantages, low, high)
        return losses, {"clip_frac": clipped.float()}


@frozen
class DualClipLoss:
    """
    PPO with a second bound for negative advantages (Ye et al. 2020, arXiv:1912.09729, equation 5).

    The objective of a token with A_t < 0 is max(min(r_t A_t, clip(r_t) A_t), c A_t): its loss is at most -c A_t,
    however likely the token has become.
    """

    config: DualClipConfig

    def compute(self, *, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, **_more: object) -> Output:
        low, high = self.config.clip_ratio_low, self.config.clip_ratio_high
        losses, clipped = clipped_surrogate(log_probs, old_log_probs, advantages, low, high)
        bound = -self.config.clip_ratio_c * advantages
        capped = (advantages < 0) & (losses > bound)
        return torch.where(capped, bound, losses), {
            "clip_frac": clipped.float(),
            "dual_clip_frac": capped.float(),
        }


@frozen
class GspoLoss:
    """
    Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071, equations 5 and 7).

    The ratio of a row is s = (pi(y) / pi_old(y))^(1/|y|), and the loss of each of its tokens is that of s with PPO's
    clip. With `loss_agg_mode: seq-mean-token-mean` and `loss_sequence: row` the objective is the paper's.
    """

    config: ClipConfig

    def compute(
        self, *, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, rows: Tensor, **_more: object
    ) -> Output:
        mean = row_means(log_probs - old_log_probs, rows)
        low, high = self.config.clip_ratio_low, self.config.clip_ratio_high
        losses, clipped = clipped_surrogate(mean, torch.zeros_like(mean), advantages, low, high)
        return losses, {"clip_frac": clipped.float()}


@frozen
class CispoLoss:
    """
    Clipped importance sampling (MiniMax-M1, arXiv:2506.13585, equations 4 and 5).

    The loss is -sg(clip(r_t, 1 - low, 1 + high)) A_t log pi: the weight is clipped and has no gradient, so every token
    keeps one.
    """

    config: ClipConfig

    def compute(self, *, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, **_more: object) -> Output:
        ratio = limit_log_ratio(log_probs - old_log_probs).exp().detach()
        weight = ratio.clamp(1 - self.config.clip_ratio_low, 1 + self.config.clip_ratio_high)
        return -weight * advantages * log_probs, {"clip_frac": (weight != ratio).float()}
