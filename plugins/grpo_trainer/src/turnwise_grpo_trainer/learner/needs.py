"""What an update has to compute, by its config."""

from __future__ import annotations

from turnwise_grpo_trainer.config import TrainConfig


def needs_old_log_probs(config: TrainConfig, *, has_reference: bool) -> bool:
    """Return whether log-probabilities are computed before the first optimizer step."""
    algorithm = config.algorithm
    dropout = config.lora is not None and config.lora.dropout > 0
    # `target_kl` bounds how far this update moves the policy, not how far it had moved since the rollout.
    if dropout or algorithm.target_kl is not None or (algorithm.use_kl_in_reward and has_reference):
        return True
    # With a single optimizer step, the forward pass of the update itself computes the same log-probabilities.
    one_step = algorithm.ppo_epochs == 1 and algorithm.ppo_mini_batch_size is None
    return algorithm.old_log_probs == "recompute" and not one_step


def needs_all_rows(config: TrainConfig, *, has_critic: bool) -> bool:
    """Return whether a row may have a gradient without an advantage."""
    algorithm = config.algorithm
    in_loss = algorithm.kl_loss_coef != 0 and not algorithm.use_kl_in_reward
    other_loss = config.loss is not None
    return in_loss or algorithm.entropy_coeff != 0 or has_critic or other_loss
