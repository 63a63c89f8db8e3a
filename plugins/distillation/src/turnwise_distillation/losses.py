"""
The losses of distillation on tokens that the policy sampled.

pi is the policy, q the teacher, pi_old the policy before the update, A_t the advantage of the reward. The teacher's
values are constants. Differences of log-probabilities are bounded by 20 nats, as everywhere in the trainer.
"""

# ruff: noqa: TID253 - factories import this module; no hook does

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from attrs import frozen
from torch import Tensor

from turnwise_distillation.config import MixtureConfig, ReverseKlConfig, TopkKlConfig
from turnwise_grpo_trainer.objective.losses import clipped_surrogate, limit_log_ratio

Output = tuple[Tensor, Mapping[str, Tensor]]


def _clipped(config: MixtureConfig, log_probs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return (M,) PPO's clipped losses, and (M,) float: whether the clip stopped the gradient."""
    losses, clipped = clipped_surrogate(log_probs, old, advantages, config.clip_ratio_low, config.clip_ratio_high)
    return losses, clipped.float()


@frozen
class ReverseKl:
    """
    On-policy distillation: KL(pi, q), estimated on the sampled tokens.

    It is PPO's clipped loss with the advantage ``reward_weight * A_t - weight * (log pi - log q)``. A token's term does
    not count the tokens after it (discount 0), as in "On-Policy Distillation" (Thinking Machines Lab, 2025); the
    expectation of its gradient over the next token is the gradient of the token's KL. MiniLLM (arXiv:2306.08543,
    equation 2) sums the terms up to the end of the response.
    """

    config: ReverseKlConfig
    columns: ClassVar[tuple[str, ...]] = ("teacher_logprobs",)
    ids_column: ClassVar[str] = ""

    def compute(
        self,
        *,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        columns: Mapping[str, Tensor],
        **_more: object,
    ) -> Output:
        """Return (M,) losses, and (M,) values: `teacher_kl`, which is log pi - log q, and `clip_frac`."""
        config = self.config
        divergence = limit_log_ratio(log_probs.detach() - columns["teacher_logprobs"])
        wanted = config.reward_weight * advantages - config.weight * divergence
        losses, clipped = _clipped(config, log_probs, old_log_probs, wanted)
        return losses, {"teacher_kl": divergence, "clip_frac": clipped}


@frozen
class TopkKl:
    """
    The KL between the policy and the teacher in each sampled token's context, over the teacher's most probable ids.

    All other ids together are one more outcome, so the value is a lower bound of the KL over the whole vocabulary
    (data processing inequality), and 0 only if both give each of these ids the same probability. It has no variance
    from the sampled token. PPO's clipped loss on A_t is added with `reward_weight`.
    """

    config: TopkKlConfig
    columns: ClassVar[tuple[str, ...]] = ("teacher_topk_ids", "teacher_topk_logprobs")
    ids_column: ClassVar[str] = "teacher_topk_ids"

    def compute(
        self,
        *,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        columns: Mapping[str, Tensor],
        id_log_probs: Tensor,
        **_more: object,
    ) -> Output:
        """Return (M,) losses, and (M,) values: `topk_kl`, and the `clip_frac` of the reward's part."""
        policy, teacher = _with_rest(id_log_probs), _with_rest(columns["teacher_topk_logprobs"].to(id_log_probs.dtype))
        first, second = (policy, teacher) if self.config.direction == "reverse" else (teacher, policy)
        divergence = (first.exp() * limit_log_ratio(first - second)).sum(-1)
        surrogate, clipped = _clipped(self.config, log_probs, old_log_probs, advantages)
        losses = self.config.weight * divergence + self.config.reward_weight * surrogate
        return losses, {"topk_kl": divergence.detach(), "clip_frac": clipped}


def _with_rest(log_probs: Tensor) -> Tensor:
    """Return (M, K + 1) log-probabilities of K ids and of all others together, from (M, K)."""
    # Rounding can make the sum 1 or more; one step below 1, its logarithm and gradient are finite.
    total = log_probs.exp().sum(-1, keepdim=True).clamp(max=1 - torch.finfo(log_probs.dtype).eps)
    return torch.cat([log_probs, torch.log1p(-total)], -1)
