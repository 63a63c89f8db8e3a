"""
The advantage `path_credit`: each parallel path has its own, by what the episode would be without the path.

An episode has the reward R and the baseline b, the mean of its group. y are the tokens sampled after a block, up to the
end of the episode. Without path k, but with all other tokens before y, the policy would write the same y with another
probability; their ratio is

    w_k = pi(y | all paths but k) / pi(y | all paths)

Tokens outside of paths have the advantage A = R - b, and the tokens of path k

    A_k = (R - b) (1 - w_k)

w_k (R - b) is an importance-weighted estimate of the episode's value without path k. This value does not depend on path
k if the reward reads only tokens outside of it. So it is a baseline: the gradient has the same expectation as with
R - b for every token. A path that changes nothing has w_k = 1 and no advantage. A path from which the answer follows
has w_k = 0 and the whole advantage. If the rest of the block spoke for the answer and the path against it, w_k > 1, and
a right answer lowers the path's probability. A bound on w_k limits the variance, and makes the expectation inexact.

The ratio needs a forward pass of the finished record without the path, under its layout. No token is sampled again.
"""

# ruff: noqa: TID253 - factories import this module; no hook does

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from turnwise_grpo_trainer.objective.advantages import grpo
from turnwise_grpo_trainer.objective.loss_options import PathCreditConfig
from turnwise_grpo_trainer.objective.path_ratios import PathRatios


@frozen
class PathCredit:
    """The estimator; see the module."""

    config: PathCreditConfig

    def estimate(
        self,
        *,
        rewards: Tensor,
        groups: Tensor,
        valid: Tensor,
        mask: Tensor,
        episodes: Tensor,
        leave_out: Callable[[Tensor], PathRatios] | None = None,
        **_more: object,
    ) -> Tensor:
        """Return (B, R) advantages; without `leave_out` there are no paths, and these are the advantages of `grpo`."""
        by_row = grpo(rewards, groups, valid, norm_adv_by_std=self.config.norm_adv_by_std)[episodes]
        whole = by_row[:, None].expand(mask.shape)
        if leave_out is None:
            return whole
        ratios = leave_out(by_row != 0)
        weights = ratios.log_ratios.exp().clamp(max=self.config.ratio_cap)
        # The last entry, which the index -1 reads, is of tokens outside of paths.
        shares = torch.cat([1 - weights, weights.new_ones(1)])
        return whole * shares[ratios.path_of]
